// A worker for tests: it appends each job that it runs to a file.
import { appendFile } from "node:fs/promises";
import { Timebell } from "timebell";

const [, , file] = process.argv;
const worker = new Timebell().worker({ concurrency: 50, leaseSeconds: 5, onError: () => {} });
worker.on("count.*", async (job) => {
  await appendFile(file, `${job.jobId}\n`);
  return { attempt: job.attempt };
});
await worker.run();
