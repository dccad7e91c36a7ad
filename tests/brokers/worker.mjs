// A BullMQ worker as a team would have it: node worker.mjs PORT QUEUE. Its payloads say what befalls a job; it says
// what it does, a line of JSON each.
import { Queue, Worker } from "bullmq";
import { reportToTimebell } from "./reporter.mjs";

const connection = { host: "127.0.0.1", port: Number(process.argv[2]), password: process.argv[4] };
const say = (fields) => process.stdout.write(JSON.stringify(fields) + "\n");
const queue = new Queue(process.argv[3], { connection });
const worker = new Worker(
  process.argv[3],
  async (job) => {
    say({ id: job.id, name: job.name, data: job.data, opts: job.opts, made: job.attemptsMade, at: Date.now() / 1000 });
    const { failures = 0, milliseconds = 0 } = job.data.payload ?? {};
    if (milliseconds) await new Promise((resolve) => setTimeout(resolve, milliseconds));
    if (job.attemptsMade < failures) throw new Error("disk full");
    return { rows: 3 };
  },
  { connection, concurrency: Number(process.argv[5] ?? 20) },
);
worker.on("error", (error) => say({ error: error.message }));
queue.on("error", () => {});
if (process.argv[6] !== "silent") reportToTimebell(queue, worker);
await worker.waitUntilReady();
say({ ready: true });
