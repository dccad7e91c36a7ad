import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { ConnectionError, TimebellError } from "./errors.js";

const RETRIED_STATUSES = new Set([408, 429, 502, 503, 504]);
const MAX_PAUSE_MS = 5_000;

export interface RequestOptions {
  /** API key; default: TIMEBELL_API_KEY. */
  apiKey?: string | undefined;
  /** Tenant, for platform keys. */
  tenant?: string | undefined;
  /** How often a request is repeated that failed temporarily (default 5). */
  retries?: number | undefined;
  /** Time of one try in milliseconds (default 60,000). */
  timeoutMs?: number | undefined;
  fetch?: typeof globalThis.fetch | undefined;
}

/**
 * Return a fetch function that authenticates, repeats requests that failed temporarily, and throws TimebellError and
 * ConnectionError. Each POST has an Idempotency-Key, so that its repetition has no further effect.
 */
export function createFetch(options: RequestOptions): (request: Request) => Promise<Response> {
  const apiKey = options.apiKey ?? process.env.TIMEBELL_API_KEY;
  const { tenant, retries = 5, timeoutMs = 60_000, fetch = globalThis.fetch } = options;
  return async (request) => {
    if (apiKey) request.headers.set("Authorization", `Bearer ${apiKey}`);
    if (tenant) request.headers.set("Timebell-Tenant", tenant);
    if (request.method === "POST" && !request.headers.has("Idempotency-Key")) {
      request.headers.set("Idempotency-Key", randomUUID());
    }
    for (let attempt = 0; ; attempt += 1) {
      let response: Response | undefined;
      let failure: unknown;
      try {
        const signal = AbortSignal.any([request.signal, AbortSignal.timeout(timeoutMs)]);
        response = await fetch(new Request(request.clone(), { signal }));
        if (response.ok) return response;
      } catch (error) {
        request.signal.throwIfAborted();
        failure = error;
      }
      if (response && (!RETRIED_STATUSES.has(response.status) || attempt >= retries)) {
        throw await TimebellError.from(response);
      }
      if (!response && attempt >= retries) throw new ConnectionError(request.url, failure);
      await response?.body?.cancel();
      await sleep(pauseMs(attempt, response), undefined, { signal: request.signal });
    }
  };
}

/** Return the pause before a repetition: what the server asks for, or an increasing one with jitter. */
function pauseMs(attempt: number, response: Response | undefined): number {
  const asked = Number(response?.headers.get("Retry-After") ?? NaN);
  if (asked > 0) return asked * 1000;
  return Math.min(100 * 2 ** attempt, MAX_PAUSE_MS) * (0.5 + Math.random() / 2);
}
