// Graphile Worker, tuned: 24 concurrent jobs, a local queue, batched completion, polling every 100 ms; addJobs.
// Schedules are defined in code.
import {
  command, create, payload, printJson, recordStart, reportUntilClosed, requirePackage, spec, url,
} from "./child.mjs";

const { run, makeWorkerUtils, parseCronItems, Logger } = requirePackage("graphile-worker");
const connectionString = url;
const logger = new Logger(() => () => {});

if (command === "work") {
  const schedules = Array.from({ length: spec.schedules ?? 0 }, (_, k) => ({
    task: "bench",
    match: "* * * * *",
    identifier: `s${k}`,
    payload: payload(k, 0),
  }));
  const runner = await run({
    connectionString,
    logger,
    noHandleSignals: true,
    taskList: { bench: async (job) => recordStart(job.i, job._cron ? Date.parse(job._cron.ts) : job.due) },
    parsedCronItems: parseCronItems(schedules),
    preset: {
      worker: {
        concurrentJobs: 24,
        maxPoolSize: 26,
        pollInterval: 100,
        localQueue: { size: 500 },
        completeJobBatchDelay: 0,
        failJobBatchDelay: 0,
      },
    },
  });
  reportUntilClosed(() => runner.stop());
} else {
  const utils = await makeWorkerUtils({ connectionString, logger });
  if (command === "setup") {
    await utils.migrate();
    printJson({ ready: true });
  }
  if (command === "create") {
    const at = (job) => (spec.lead > 0 ? { runAt: new Date(job.due) } : {});
    await create((batch) => utils.addJobs(batch.map((job) => ({ identifier: "bench", payload: job, ...at(job) }))));
  }
  await utils.release();
  process.exit(0);
}
