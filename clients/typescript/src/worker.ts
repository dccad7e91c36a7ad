import { randomUUID } from "node:crypto";
import { hostname } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";
import type { Client } from "openapi-fetch";
import { TimebellError } from "./errors.js";
import type { components, paths } from "./schema.js";

type Schemas = components["schemas"];
type Verb = "complete" | "fail" | "return";
/** A job that this worker has started. */
export type ClaimedJob<Payload = any> = Omit<Schemas["ClaimedJobOut"], "payload"> & { payload: Payload };

/** What a handler gets besides the job. */
export interface JobContext {
  /** Aborted when the job was cancelled, has timed out or was lost; the outcome is then ignored. */
  signal: AbortSignal;
  /** Report progress: a fraction from 0 to 1, a text, or both. It is sent with the next heartbeat. */
  progress(fraction?: number, text?: string): void;
}

/** Runs a job. The return value is stored as its result; an error is a failure, and retried by the job's policy. */
export type Handler<Payload = any> = (job: ClaimedJob<Payload>, context: JobContext) => unknown;

export interface WorkerOptions {
  /** Unique name of the process (default: host name, process id and a random part). */
  name?: string;
  /** Jobs that run at the same time (default 10). */
  concurrency?: number;
  /** Claim from these queues only. */
  queues?: string[];
  /** Time without a heartbeat after which jobs are retried elsewhere (default 30). */
  leaseSeconds?: number;
  /** Time for running jobs to finish when the worker stops; then they are returned (default 30). */
  stopSeconds?: number;
  /** Called with errors outside of handlers, such as an unreachable server (default: console.error). */
  onError?: (error: unknown) => void;
}

/** Throw it in a handler to fail without another attempt, or to be retried after a delay. */
export class JobFailure extends Error {
  constructor(
    message: string,
    readonly options: { code?: string; retryable?: boolean; retryAfterSeconds?: number } = {},
  ) {
    super(message);
    this.name = "JobFailure";
  }
}

interface Running {
  job: ClaimedJob;
  aborter: AbortController;
  progress?: { progress?: number; progressText?: string };
}

interface Report {
  verb: Verb;
  job: Record<string, unknown>;
  sent: () => void;
}

const MAX_BATCH_SIZE = 500;

/** Claims due jobs and runs them. Register handlers with `on`, then `run` until `stop` or SIGTERM. */
export class Worker {
  readonly name: string;
  private readonly handlers = new Map<string, Handler>();
  private readonly running = new Map<string, Running>();
  private readonly stopper = new AbortController();
  private readonly concurrency: number;
  private readonly leaseSeconds: number;
  private reports: Report[] = [];
  private reporting: Promise<void> | undefined;
  private slotFreed: () => void = () => {};

  constructor(
    private readonly api: Client<paths>,
    private readonly options: WorkerOptions,
  ) {
    this.name = options.name ?? `${hostname()}-${process.pid}-${randomUUID().slice(0, 8)}`;
    this.concurrency = options.concurrency ?? 10;
    this.leaseSeconds = options.leaseSeconds ?? 30;
  }

  /** Register the handler of a topic, of a prefix such as `billing.*`, or of `*`. The most specific one runs a job. */
  on<Payload = any>(topic: string, handler: Handler<Payload>): this {
    if (this.handlers.has(topic)) throw new TypeError(`There is a handler of ${topic} already.`);
    this.handlers.set(topic, handler);
    return this;
  }

  /** Run jobs until `stop`, SIGTERM, SIGINT, or until an operator drains the worker. */
  async run(): Promise<void> {
    if (this.handlers.size === 0) throw new TypeError("The worker has no handler: call worker.on(topic, handler).");
    const stop = () => void this.stopper.abort();
    process.once("SIGTERM", stop).once("SIGINT", stop);
    const heartbeats = setInterval(() => void this.beat(), (this.leaseSeconds * 1000) / 3);
    try {
      await this.claimUntilStopped();
      await this.finish();
    } finally {
      clearInterval(heartbeats);
      process.off("SIGTERM", stop).off("SIGINT", stop);
    }
  }

  /** Stop claiming; `run` returns after the running jobs. */
  stop(): void {
    this.stopper.abort();
  }

  private async claimUntilStopped(): Promise<void> {
    let claimId = randomUUID();
    for (let failures = 0; ; ) {
      if (this.stopper.signal.aborted) return;
      const free = this.concurrency - this.running.size;
      if (free <= 0) {
        await new Promise<void>((resolve) => {
          this.slotFreed = resolve;
          this.stopper.signal.addEventListener("abort", () => resolve(), { once: true });
        });
        continue;
      }
      try {
        const waitSeconds = this.running.size === 0 ? 20 : 5;
        const claimed = await this.claim(claimId, Math.min(free, MAX_BATCH_SIZE), waitSeconds, this.stopper.signal);
        for (const job of claimed.jobs) void this.runJob(job);
        if (claimed.draining) this.stop();
        claimId = randomUUID();
        failures = 0;
      } catch (error) {
        if (this.stopper.signal.aborted) return await this.returnClaim(claimId);
        this.report(error);
        const isFinal = error instanceof TimebellError && error.status < 500 && error.status !== 429;
        if (isFinal) throw error;
        failures += 1; // repeat with the same id: the response may have been lost
        await sleep(Math.min(100 * 2 ** failures, 5000), undefined, { signal: this.stopper.signal }).catch(() => {});
      }
    }
  }

  private async claim(
    claimId: string,
    max: number,
    waitSeconds: number,
    signal?: AbortSignal,
  ): Promise<Schemas["ClaimOut"]> {
    const body = {
      worker: this.name, topics: [...this.handlers.keys()], max, waitSeconds, leaseSeconds: this.leaseSeconds, claimId,
      ...(this.options.queues ? { queues: this.options.queues } : {}),
    };
    const { data } = await this.api.POST("/api/v1/claims", { body, signal });
    return data as Schemas["ClaimOut"];
  }

  /** Return the jobs of a claim that was aborted, in case the server had started them already. */
  private async returnClaim(claimId: string): Promise<void> {
    try {
      const { jobs } = await this.claim(claimId, 1, 0);
      await Promise.all(jobs.map(({ jobId, token }) => this.send("return", { jobId, token })));
    } catch (error) {
      this.report(error); // their lease ends
    }
  }

  private async runJob(job: ClaimedJob): Promise<void> {
    const running: Running = { job, aborter: new AbortController() };
    this.running.set(job.jobId, running);
    const timeout = setTimeout(() => running.aborter.abort(new Error("The job has timed out.")), job.timeoutSeconds * 1000);
    const proof = { jobId: job.jobId, token: job.token };
    const context: JobContext = {
      signal: running.aborter.signal,
      progress: (progress, progressText) => void (running.progress = { progress, progressText }),
    };
    try {
      const result = await this.handlerOf(job.topic)(job, context);
      await this.send("complete", { ...proof, result: result ?? null });
    } catch (error) {
      const options = error instanceof JobFailure ? error.options : {};
      const message = error instanceof Error ? error.message || error.name : String(error);
      await this.send("fail", { ...proof, error: message.slice(0, 4000), ...options });
    } finally {
      clearTimeout(timeout);
      if (this.running.get(job.jobId) === running) this.running.delete(job.jobId);
      this.slotFreed();
    }
  }

  private handlerOf(topic: string): Handler {
    const exact = this.handlers.get(topic);
    if (exact) return exact;
    const prefixes = [...this.handlers.keys()].filter((each) => each.endsWith(".*") && topic.startsWith(each.slice(0, -1)));
    const longest = prefixes.sort((one, other) => other.length - one.length)[0];
    const handler = this.handlers.get(longest ?? "*");
    if (!handler) throw new JobFailure(`No handler of ${topic}.`);
    return handler;
  }

  /** Report an outcome with those that other jobs reach meanwhile; return when the server has it. */
  private send(verb: Verb, job: Record<string, unknown>): Promise<void> {
    return new Promise((sent) => {
      this.reports.push({ verb, job, sent });
      this.reporting ??= this.sendReports().finally(() => (this.reporting = undefined));
    });
  }

  private async sendReports(): Promise<void> {
    while (this.reports.length > 0) {
      const verb = this.reports[0]!.verb;
      const batch = this.reports.filter((each) => each.verb === verb).slice(0, 100);
      const taken = new Set(batch);
      this.reports = this.reports.filter((each) => !taken.has(each));
      await this.sendBatch(verb, batch);
      for (const each of batch) each.sent();
    }
  }

  /** Send reports until the server has answered. A refused report is dropped: the job runs again, or has ended. */
  private async sendBatch(verb: Verb, batch: Report[]): Promise<void> {
    for (let failures = 0; ; failures += 1) {
      try {
        const jobs = batch.map((each) => each.job);
        const { data } = await this.api.POST(`/api/v1/claims/${verb}`, { body: { jobs } as never });
        for (const job of data?.jobs ?? []) {
          if (job.code) this.report(new Error(`The report of job ${job.jobId} was refused: ${job.code}.`));
        }
        return;
      } catch (error) {
        const isFinal = error instanceof TimebellError && error.status < 500 && error.status !== 429;
        if (isFinal && batch.length > 1) {
          for (const each of batch) await this.sendBatch(verb, [each]); // one of them is the cause
          return;
        }
        this.report(error);
        if (isFinal) return;
        await sleep(Math.min(100 * 2 ** failures, 5000));
      }
    }
  }

  private async beat(): Promise<void> {
    const jobs = [...this.running.values()].map(({ job, progress }) => ({ jobId: job.jobId, token: job.token, ...progress }));
    try {
      for (let start = 0; start === 0 || start < jobs.length; start += MAX_BATCH_SIZE) {
        const body = { worker: this.name, leaseSeconds: this.leaseSeconds, jobs: jobs.slice(start, start + MAX_BATCH_SIZE) };
        const { data } = await this.api.POST("/api/v1/claims/heartbeat", { body });
        if (data?.draining) this.stop();
        for (const { jobId, code, cancelRequested } of data?.jobs ?? []) {
          if (code || cancelRequested) this.running.get(jobId)?.aborter.abort(new Error(code ?? "The job was cancelled."));
        }
      }
    } catch (error) {
      this.report(error);
    }
  }

  /** Let running jobs finish, then return the others. */
  private async finish(): Promise<void> {
    const end = Date.now() + (this.options.stopSeconds ?? 30) * 1000;
    while (this.running.size > 0 && Date.now() < end) await sleep(20);
    const left = [...this.running.values()];
    for (const { aborter } of left) aborter.abort(new Error("The worker stops."));
    const proofs = left.map(({ job }) => ({ jobId: job.jobId, token: job.token }));
    await Promise.all(proofs.map((proof) => this.send("return", proof)));
  }

  private report(error: unknown): void {
    (this.options.onError ?? console.error)(error);
  }
}
