// BullMQ: 100 jobs at once in a worker, done ones removed; addBulk; job schedulers.
import { command, create, mark, need, payload, repeat, spec, tell, url, working } from "./child.mjs";

const { Queue, Worker } = need("bullmq");
const connection = { host: "127.0.0.1", port: Number(new URL(url).port), maxRetriesPerRequest: null };

if (command === "work") {
  const due = (job) => (spec.schedules ? Number(job.opts.prevMillis) || 0 : job.data.due);
  const worker = new Worker("bench", async (job) => mark(job.data.i, due(job)), {
    connection,
    concurrency: 100,
    removeOnComplete: { count: 0 },
  });
  worker.on("error", (failed) => console.error(failed.message));
  await worker.waitUntilReady();
  working(() => worker.close());
} else {
  const queue = new Queue("bench", { connection });
  await queue.waitUntilReady();
  if (command === "setup") tell({ ready: true });
  if (command === "create") {
    const options = (job) => (spec.lead > 0 ? { delay: Math.max(0, job.due - Date.now()) } : {});
    await create((batch) => queue.addBulk(batch.map((job) => ({ name: "bench", data: job, opts: options(job) }))));
  }
  if (command === "repeat") {
    const write = (k) =>
      queue.upsertJobScheduler(`s${k}`, { pattern: "* * * * *" }, { name: "bench", data: payload(k, 0) });
    await repeat(50, write);
  }
  await queue.close();
  process.exit(0);
}
