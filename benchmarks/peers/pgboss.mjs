// pg-boss: batches of 500 twice at once, LISTEN/NOTIFY, the shortest poll it allows; insert; its own schedules.
import { command, create, mark, need, payload, repeat, spec, tell, url, working } from "./child.mjs";

const { PgBoss } = need("pg-boss");
const works = command === "work";
const often = works ? { cronMonitorIntervalSeconds: 1, cronWorkerIntervalSeconds: 1 } : {};
const boss = new PgBoss({
  connectionString: url,
  max: 12,
  useListenNotify: works,
  supervise: works,
  schedule: works,
  ...often,
});
boss.on("error", (failed) => console.error(failed.message));
await boss.start();

if (works) {
  const options = {
    batchSize: 500,
    localConcurrency: 2,
    pollingIntervalSeconds: 0.5,
    notifyPollingIntervalSeconds: 0.5,
    burstWhenBatchFull: true,
  };
  await boss.work("bench", options, async (jobs) => {
    for (const job of jobs) mark(job.data.i, job.data.due);
  });
  working(() => boss.stop({ graceful: true, timeout: 3000 }));
} else {
  if (command === "setup") {
    await boss.createQueue("bench", { notify: true });
    tell({ ready: true });
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
