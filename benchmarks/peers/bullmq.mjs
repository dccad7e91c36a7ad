// BullMQ: 100 concurrent jobs per worker, completed jobs are removed; addBulk; job schedulers.
import {
  command, create, payload, printJson, recordStart, repeat, reportUntilClosed, requirePackage, spec, url,
} from "./child.mjs";

const { Queue, Worker } = requirePackage("bullmq");
const connection = { host: "127.0.0.1", port: Number(new URL(url).port), maxRetriesPerRequest: null };

if (command === "work") {
  const due = (job) => (spec.schedules ? Number(job.opts.prevMillis) || 0 : job.data.due);
  const worker = new Worker("bench", async (job) => recordStart(job.data.i, due(job)), {
    connection,
    concurrency: 100,
    removeOnComplete: { count: 0 },
  });
  worker.on("error", (error) => console.error(error.message));
  await worker.waitUntilReady();
  reportUntilClosed(() => worker.close());
} else {
  const queue = new Queue("bench", { connection });
  await queue.waitUntilReady();
  if (command === "setup") printJson({ ready: true });
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
