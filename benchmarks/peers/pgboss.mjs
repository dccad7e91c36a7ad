// pg-boss: two concurrent batches of 500, LISTEN/NOTIFY, the minimum polling interval; insert; its own schedules.
import {
  command, create, payload, printJson, recordStart, reportStartup, repeat, reportUntilClosed, requirePackage, spec, url, wait, waits,
} from "./child.mjs";

const { PgBoss } = requirePackage("pg-boss");
const isWorker = command === "work";
const cronIntervals = isWorker ? { cronMonitorIntervalSeconds: 1, cronWorkerIntervalSeconds: 1 } : {};
const boss = new PgBoss({
  connectionString: url,
  max: 12,
  useListenNotify: isWorker,
  supervise: isWorker,
  schedule: isWorker,
  ...cronIntervals,
});
boss.on("error", (error) => console.error(error.message));
await boss.start();

if (isWorker) {
  const options = {
    batchSize: 500,
    localConcurrency: 2,
    pollingIntervalSeconds: 0.5,
    notifyPollingIntervalSeconds: 0.5,
    burstWhenBatchFull: true,
  };
  reportStartup();
  await boss.work("bench", options, async (jobs) => {
    for (const job of jobs) recordStart(job.data.i, job.data.due);
    if (waits) await Promise.all(jobs.map(wait));
  });
  reportUntilClosed(() => boss.stop({ graceful: true, timeout: 3000 }));
} else {
  if (command === "setup") {
    await boss.createQueue("bench", { notify: true });
    printJson({ ready: true });
  }
  if (command === "create") {
    const at = (job) => (spec.lead > 0 ? { startAfter: new Date(job.due) } : {});
    await create((batch) => boss.insert("bench", batch.map((job) => ({ data: job, ...at(job) }))));
  }
  if (command === "repeat") {
    await repeat(10, (k) => boss.schedule("bench", "* * * * *", payload(k, 0), { key: `s${k}` }));
  }
  await boss.stop({ graceful: false });
  process.exit(0);
}
