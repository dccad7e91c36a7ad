import { setTimeout as sleep } from "node:timers/promises";

/** The parts of BullMQ that the reporter uses, so that any version of it fits. */
interface BullJob {
  id?: string;
  data: { report?: { url: string; token: string } };
  finishedOn?: number;
}
interface BullQueue {
  getJob(id: string): Promise<BullJob | undefined | null>;
}
interface BullWorker {
  on(event: "completed", listener: (job: any, result: any) => void): unknown;
  on(event: "failed", listener: (job: any, error: Error) => void): unknown;
}

export interface ReporterOptions {
  /** API key; default: TIMEBELL_API_KEY. */
  apiKey?: string;
  /** Reports sent at the same time (default 20). */
  concurrency?: number;
  /** Called for reports that Timebell refuses (default: console.error). */
  onError?: (error: Error) => void;
}

const MAX_PAUSE_MS = 600_000;

/** Report the results of Timebell's jobs with `ack: reported` that a BullMQ worker runs. Call it once per worker. */
export function reportToTimebell(queue: BullQueue, worker: BullWorker, options: ReporterOptions = {}): void {
  const { apiKey = process.env.TIMEBELL_API_KEY, onError = console.error } = options;
  let free = options.concurrency ?? 20;
  const waiting: (() => void)[] = [];

  async function post(job: BullJob, verb: string, fields: object): Promise<void> {
    const stored = job.id === undefined ? null : await queue.getJob(job.id); // a later attempt has stored its token there
    const { report } = (stored ?? job).data;
    if (!report) return;
    const response = await fetch(`${report.url}/${verb}`, {
      method: "POST",
      headers: { "content-type": "application/json", authorization: `Bearer ${apiKey}` },
      body: JSON.stringify({ token: report.token, ...fields }),
    });
    if (response.status >= 500 || response.status === 429) throw new Error(`HTTP ${response.status}`);
    if (!response.ok) onError(new Error(`${verb} of ${job.id}: ${response.status} ${await response.text()}`));
  }

  async function report(job: BullJob, verb: string, fields: object): Promise<void> {
    if (free > 0) free -= 1;
    else await new Promise<void>((resolve) => waiting.push(resolve));
    try {
      for (let pause = 500; pause < MAX_PAUSE_MS; pause *= 2) {
        try {
          return await post(job, verb, fields);
        } catch {
          await sleep(pause); // Timebell, or Redis, is unavailable or busy
        }
      }
      onError(new Error(`Gave up reporting ${verb} of ${job.id}: the job times out in Timebell.`));
    } finally {
      const next = waiting.shift();
      if (next) next();
      else free += 1;
    }
  }

  worker.on("completed", (job: BullJob, result: unknown) => void report(job, "complete", { result: result ?? null }));
  worker.on("failed", (job: BullJob | undefined, error: Error) => {
    if (!job?.finishedOn) return; // BullMQ retries it
    void report(job, "fail", { error: (error.message || "failed").slice(0, 4000), retryable: false });
  });
}
