// BullMQ: 100 concurrent jobs per worker (500 that wait), completed jobs are removed; addBulk; job schedulers.
import { createHmac } from "node:crypto";
import {
  command, create, payload, printJson, recordStart, reportStartup, repeat, reportUntilClosed, requirePackage, spec, url, wait, waits,
} from "./child.mjs";

const { Queue, Worker } = requirePackage("bullmq");
const KEY = Buffer.alloc(32, 1);
const connection = { host: "127.0.0.1", port: Number(new URL(url).port), maxRetriesPerRequest: null };

// Post a signed webhook (Standard Webhooks).
async function post(job) {
  const body = JSON.stringify(job.data);
  const at = Math.floor(Date.now() / 1000);
  const signature = createHmac("sha256", KEY).update(`${job.id}.${at}.${body}`).digest("base64");
  const response = await fetch(spec.webhook, {
    method: "POST",
    body,
    headers: {
      "content-type": "application/json",
      "webhook-id": job.id,
      "webhook-timestamp": String(at),
      "webhook-signature": `v1,${signature}`,
    },
  });
  await response.arrayBuffer();
  if (!response.ok) throw new Error(`answered ${response.status}`);
}

if (command === "work") {
  const due = (job) => (spec.schedules ? Number(job.opts.prevMillis) || 0 : job.data.due);
  const handle = async (job) => {
    if (spec.webhook) return post(job);
    recordStart(job.data.i, due(job));
    if (waits) await wait();
  };
  reportStartup();
  const worker = new Worker("bench", handle, {
    connection,
    concurrency: waits ? 500 : 100,
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
