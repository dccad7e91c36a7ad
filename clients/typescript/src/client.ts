import createClient, { type Client } from "openapi-fetch";
import { createFetch, type RequestOptions } from "./requests.js";
import type { components, operations, paths } from "./schema.js";
import { Worker, type WorkerOptions } from "./worker.js";

type Schemas = components["schemas"];
type Query<Name extends keyof operations> = NonNullable<operations[Name]["parameters"]["query"]>;
export type Job = Schemas["JobOut"];
export type Schedule = Schemas["ScheduleOut"];
export type Execution = Schemas["ExecutionPage"]["items"][number];
/** Body of a new schedule, such as `{ name, cronExpression, timezone, jobType }`. */
export type CreateScheduleRequest = Schemas["ScheduleIn"];
export type CreateJobRequest = Schemas["JobIn"];
export type CancelResult = Schemas["JobCancelOut"];

export interface ClientOptions extends RequestOptions {
  /** Address of a node or load balancer; default: TIMEBELL_URL, then http://127.0.0.1:8700. */
  url?: string | undefined;
}

interface Page<Item> {
  items: Item[];
  nextCursor: string | null;
}

/** A client of the API. Methods throw TimebellError, whose `code` is stable. */
export class Timebell {
  /** Every operation, typed by its path: `api.GET("/api/v1/jobs/{id}", { params: { path: { id } } })`. */
  readonly api: Client<paths>;
  readonly jobs: Jobs;
  readonly schedules: Schedules;

  constructor(options: ClientOptions = {}) {
    const url = options.url ?? process.env.TIMEBELL_URL ?? "http://127.0.0.1:8700";
    this.api = createClient<paths>({ baseUrl: url.replace(/\/$/, ""), fetch: createFetch(options) });
    this.jobs = new Jobs(this.api);
    this.schedules = new Schedules(this.api);
  }

  /** Return a worker that runs due jobs in this process. */
  worker(options: WorkerOptions = {}): Worker {
    return new Worker(this.api, options);
  }
}

class Jobs {
  constructor(private readonly api: Client<paths>) {}

  /** Create a job; without `runAt` it is due now. */
  async create(body: CreateJobRequest): Promise<Job> {
    return data(await this.api.POST("/api/v1/jobs", { body }));
  }

  async get(id: string): Promise<Job> {
    return data(await this.api.GET("/api/v1/jobs/{id}", { params: { path: { id } } }));
  }

  /** Yield all matching jobs, newest first. */
  list(query: Query<"listJobs"> = {}): AsyncGenerator<Schemas["JobPage"]["items"][number]> {
    return pages(query, async (page) => data(await this.api.GET("/api/v1/jobs", { params: { query: page } })));
  }

  /** Prevent a job from starting; if it runs, from being retried. Never fails for a known id. */
  async cancel(id: string): Promise<CancelResult> {
    return data(await this.api.POST("/api/v1/jobs/{id}/cancel", { params: { path: { id } } }));
  }

  /** Replace a job with a new one at another time, and return that. */
  async reschedule(id: string, body: Schemas["RescheduleIn"]): Promise<Job> {
    return data(await this.api.POST("/api/v1/jobs/{id}/reschedule", { params: { path: { id } }, body }));
  }

  /** Retry a failed job. */
  async retry(id: string): Promise<Job> {
    return data(await this.api.POST("/api/v1/jobs/{id}/retry", { params: { path: { id } } })) as Job;
  }
}

class Schedules {
  constructor(private readonly api: Client<paths>) {}

  async create(body: CreateScheduleRequest): Promise<Schedule> {
    return data(await this.api.POST("/api/v1/schedules", { body }));
  }

  /** Create the schedule with this name, or replace it. */
  async put(name: string, body: Omit<CreateScheduleRequest, "name">): Promise<Schedule> {
    const path = "/api/v1/schedules/by-name/{name}";
    return data(await this.api.PUT(path, { params: { path: { name } }, headers: { "If-Match": "*" }, body: body as never }));
  }

  async get(id: string): Promise<Schedule> {
    return data(await this.api.GET("/api/v1/schedules/{id}", { params: { path: { id } } }));
  }

  /** Yield all matching schedules, newest first. */
  list(query: Query<"listSchedules"> = {}): AsyncGenerator<Schemas["SchedulePage"]["items"][number]> {
    return pages(query, async (page) => data(await this.api.GET("/api/v1/schedules", { params: { query: page } })));
  }

  /** Change fields of a schedule; null resets a field. With `revision`, only if it still has that revision. */
  async update(id: string, changes: Partial<CreateScheduleRequest>, revision?: number): Promise<Schedule> {
    const headers = { "If-Match": revision === undefined ? "*" : `"${revision}"` };
    return data(await this.api.PATCH("/api/v1/schedules/{id}", { params: { path: { id } }, headers, body: changes }));
  }

  async delete(id: string): Promise<void> {
    await this.api.DELETE("/api/v1/schedules/{id}", { params: { path: { id } }, headers: { "If-Match": "*" } });
  }

  async pause(id: string, reason?: string): Promise<Schedule> {
    return data(await this.api.POST("/api/v1/schedules/{id}/pause", { params: { path: { id } }, body: { reason } }));
  }

  async resume(id: string): Promise<Schedule> {
    return data(await this.api.POST("/api/v1/schedules/{id}/resume", { params: { path: { id } } }));
  }

  /** Start a run now, besides the planned ones. */
  async trigger(id: string): Promise<Job> {
    return data(await this.api.POST("/api/v1/schedules/{id}/trigger", { params: { path: { id } } })) as Job;
  }

  /** Yield the runs of a schedule, newest first. `limit` is the size of a page. */
  executions(id: string, query: Query<"listExecutions"> = {}): AsyncGenerator<Execution> {
    const path = "/api/v1/schedules/{id}/executions";
    return pages(query, async (page) => data(await this.api.GET(path, { params: { path: { id }, query: page } })));
  }
}

/** Return the body of a response; the fetch function has thrown all errors. */
function data<Body>(result: { data?: Body }): NonNullable<Body> {
  if (result.data === undefined || result.data === null) throw new TypeError("The response has no body.");
  return result.data;
}

async function* pages<Item, Q extends { cursor?: string | null }>(
  query: Q,
  read: (query: Q) => Promise<Page<Item>>,
): AsyncGenerator<Item> {
  for (let cursor = query.cursor; ; ) {
    const page = await read({ ...query, cursor });
    yield* page.items;
    if (!page.nextCursor) return;
    cursor = page.nextCursor;
  }
}
