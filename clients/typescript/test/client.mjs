// Exercises the client against the server in TIMEBELL_URL. Prints "ok" at the end.
import assert from "node:assert/strict";
import { createHmac } from "node:crypto";
import { JobFailure, Timebell, TimebellError, verifyWebhook, WebhookVerificationError } from "timebell";

const timebell = new Timebell();

// Schedules, as in a scheduler's API design: POST, GET ?enabled=true&jobType=, pause, resume, trigger, executions
/** @type {import("timebell").CreateScheduleRequest} */
const request = {
  name: "nightly-report",
  cronExpression: "0 2 * * *",
  timezone: "America/New_York",
  jobType: "nightly-report",
  jobPayload: { kind: "daily" },
  maxRetries: 3,
  timeoutSeconds: 3600,
  overlapPolicy: "skip",
  enabled: true,
};
const schedule = await timebell.schedules.create(request);
assert.equal(schedule.name, "nightly-report");
const found = await Array.fromAsync?.(timebell.schedules.list({ enabled: true, jobType: "nightly-report" }));
if (found) assert.deepEqual(found.map((each) => each.id), [schedule.id]);
assert.equal((await timebell.schedules.update(schedule.id, { description: "x" }, schedule.revision)).description, "x");
await assert.rejects(timebell.schedules.update(schedule.id, { description: "y" }, schedule.revision), { code: "REVISION_STALE" });
assert.equal((await timebell.schedules.pause(schedule.id, "test")).enabled, false);
assert.equal((await timebell.schedules.resume(schedule.id)).enabled, true);
const triggered = await timebell.schedules.trigger(schedule.id);

const errors = [];
const worker = timebell.worker({ concurrency: 2, onError: (error) => errors.push(error) });
worker.on("nightly-report", (job) => ({ kind: job.payload.kind }));
worker.on("fails", () => {
  throw new JobFailure("no paper", { code: "NO_PAPER", retryable: false });
});
worker.on("waits", (_job, { signal, progress }) => {
  progress(0.5, "half");
  return new Promise((_resolve, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
});
const run = worker.run();
async function ended(id) {
  for (;;) {
    const job = await timebell.jobs.get(id);
    if (!["pending", "running", "dispatched"].includes(job.status)) return job;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}
assert.deepEqual((await ended(triggered.id)).result, { kind: "daily" });
const executions = [];
for await (const each of timebell.schedules.executions(schedule.id, { limit: 20, status: "completed" })) executions.push(each);
assert.equal(executions.length, 1);
const failed = await ended((await timebell.jobs.create({ topic: "fails", timezone: "UTC" })).id);
assert.deepEqual([failed.status, failed.errorCode], ["failed", "NO_PAPER"]);

// Pages as iterators
const created = new Set();
for (let index = 0; index < 5; index += 1) {
  created.add((await timebell.jobs.create({ topic: "later", timezone: "UTC", runAt: "2040-01-01T00:00:00Z" })).id);
}
const listed = new Set();
for await (const job of timebell.jobs.list({ topic: "later", limit: 2 })) listed.add(job.id);
assert.deepEqual(listed, created);
const [one] = created;
assert.equal((await timebell.jobs.cancel(one)).outcome, "prevented");

// Errors have codes
const error = await timebell.jobs.create({ topic: "t", timezone: "UTC", runAt: "2001-01-01T00:00:00Z" }).catch((each) => each);
assert.ok(error instanceof TimebellError);
assert.deepEqual([error.code, error.status], ["SCHEDULE_IN_THE_PAST", 400]);
await assert.rejects(new Timebell({ apiKey: "tb_live_wrong" }).jobs.get(one), { code: "UNAUTHORIZED" });

// Repetition: the first response to this POST is lost, the job exists once
let lost = 0;
const flaky = new Timebell({
  fetch: async (sent) => {
    const response = await fetch(sent);
    if (lost++ === 0) throw new TypeError("connection lost");
    return response;
  },
});
const repeated = await flaky.jobs.create({ topic: "repeated", timezone: "UTC", runAt: "2040-01-01T00:00:00Z" });
const same = [];
for await (const job of timebell.jobs.list({ topic: "repeated" })) same.push(job.id);
assert.deepEqual(same, [repeated.id]);

// A stopping worker ends in time
worker.stop();
await run;
assert.deepEqual(errors, []);

// Webhooks
const secret = `whsec_${Buffer.from("0123456789abcdef0123456789abcdef").toString("base64")}`;
const timestamp = String(Math.floor(Date.now() / 1000));
const body = '{"topic":"t"}';
const digest = createHmac("sha256", "0123456789abcdef0123456789abcdef").update(`m1.${timestamp}.${body}`).digest("base64");
const headers = { "webhook-id": "m1", "webhook-timestamp": timestamp, "webhook-signature": `v1,x v1,${digest}` };
assert.deepEqual(verifyWebhook(body, headers, secret), { topic: "t" });
assert.deepEqual(verifyWebhook(Buffer.from(body), new Headers(headers), ["whsec_AAAA", secret]), { topic: "t" });
assert.throws(() => verifyWebhook(`${body} `, headers, secret), WebhookVerificationError);
assert.throws(() => verifyWebhook(body, { ...headers, "webhook-timestamp": "1" }, secret), WebhookVerificationError);
assert.throws(() => verifyWebhook(body, {}, secret), WebhookVerificationError);
console.log("ok");
