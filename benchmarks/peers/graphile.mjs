// Graphile Worker, tuned: 24 concurrent jobs (500 that wait), a local queue, batched completion, polling every 100 ms; addJobs.
// Schedules are defined in code.
import {
  command, create, payload, printJson, recordStart, reportStartup, reportUntilClosed, requirePackage, spec, url, wait, waits,
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
  reportStartup();
  const runner = await run({
    connectionString,
    logger,
    noHandleSignals: true,
    taskList: {
      bench: async (job) => {
        recordStart(job.i, job._cron ? Date.parse(job._cron.ts) : job.due);
        if (waits) await wait();
      },
    },
    parsedCronItems: parseCronItems(schedules),
    preset: {
      worker: {
        concurrentJobs: waits ? 500 : 24,
        maxPoolSize: 26,
        pollInterval: 100,
        localQueue: { size: waits ? 1000 : 500 },
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
