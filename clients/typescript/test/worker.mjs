// A worker for tests: `started` and `acknowledged` lines show which attempts it began, and whose result the server has.
import { openSync, writeSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { Timebell } from "timebell";

const [, , file, name] = process.argv;
const log = openSync(file, "a");
const attempts = new Map();

function write(event, token) {
  writeSync(log, `${event} ${attempts.get(token)} ${name}\n`);
}

async function recordingFetch(request) {
  const sent = request.url.endsWith("/claims/complete") ? (await request.clone().json()).jobs : [];
  const response = await fetch(request);
  const answered = response.ok && sent.length > 0 ? (await response.clone().json()).jobs : [];
  answered.forEach(({ code }, at) => code || write("acknowledged", sent[at].token));
  return response;
}

const worker = new Timebell({ fetch: recordingFetch }).worker({ concurrency: 50, leaseSeconds: 10, onError: () => {} });
worker.on("count.*", async (job) => {
  attempts.set(job.token, `${job.jobId} ${job.attempt}`);
  write("started", job.token);
  await sleep(Math.random() * 200);
});
await worker.run();
