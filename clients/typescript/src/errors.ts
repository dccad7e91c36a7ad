/** Stable codes of errors: those that any operation may return, and any other one. */
export type ErrorCode =
  | "UNAUTHORIZED"
  | "SCOPE_MISSING"
  | "ROLE_TOO_LOW"
  | "TENANT_FORBIDDEN"
  | "INVALID_FIELDS"
  | "INVALID_JSON"
  | "UNKNOWN_PARAMETER"
  | "IDEMPOTENCY_KEY_REUSED"
  | "LIMIT_REACHED"
  | "DATABASE_UNREACHABLE"
  | "TOO_BUSY"
  | "JOB_NOT_FOUND"
  | "SCHEDULE_NOT_FOUND"
  | "SCHEDULE_IN_THE_PAST"
  | "SCHEDULE_CLIENT_REQUEST_ID_IN_USE"
  | "REVISION_STALE"
  | "REVISION_MISSING"
  | "ATTEMPT_ENDED"
  | "INVALID_TOKEN"
  | (string & {});

/** The body of an error (RFC 9457). */
export interface Problem {
  type: string;
  title: string;
  status: number;
  code: ErrorCode;
  detail: string;
  fix?: string;
  requestId?: string;
  existing?: unknown;
  errors?: { field?: string; code?: string; detail?: string }[];
  [member: string]: unknown;
}

/** A refused request. `code` is stable; `problem` is the whole body. */
export class TimebellError extends Error {
  readonly code: ErrorCode;
  readonly status: number;
  readonly problem: Problem;

  constructor(problem: Problem) {
    super(problem.fix ? `${problem.detail} ${problem.fix}` : problem.detail);
    this.name = "TimebellError";
    this.code = problem.code;
    this.status = problem.status;
    this.problem = problem;
  }

  /** Read the error of a response, also of one that a proxy has sent. */
  static async from(response: Response): Promise<TimebellError> {
    const text = await response.text();
    try {
      const problem: Problem = JSON.parse(text);
      if (typeof problem.code === "string") return new TimebellError(problem);
    } catch {
      // not from Timebell
    }
    const { status, statusText } = response;
    const detail = `HTTP ${status} ${statusText}: ${text.slice(0, 200)}`;
    return new TimebellError({ type: "about:blank", title: statusText, status, code: `HTTP_${status}`, detail });
  }
}

/** The server could not be reached, in spite of retries. */
export class ConnectionError extends Error {
  constructor(url: string, cause: unknown) {
    super(`Could not reach ${url}: ${cause instanceof Error ? cause.message : String(cause)}`, { cause });
    this.name = "ConnectionError";
  }
}
