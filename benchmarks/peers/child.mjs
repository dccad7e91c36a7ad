// Shared code of the measured processes in Node.js; ../child.py is its counterpart for Python.
import fs from "node:fs";
import { createRequire } from "node:module";

export const [, , command, url, specJson] = process.argv;
export const spec = JSON.parse(specJson);
export const requirePackage = createRequire(`${process.env.BENCH_NODE}/package.json`);
const starts = [];
const PAD = "x".repeat(60);

export const printJson = (facts) => process.stdout.write(`${JSON.stringify(facts)}\n`);
export const payload = (number, due) => ({ i: number, due, pad: PAD });

// Record that the handler of a job started now; `due` in milliseconds.
export const recordStart = (number, due) => starts.push(number, due / 1000, Date.now() / 1000);

// Print the CPU time so far; called just before the worker begins to look for jobs.
export const reportStartup = () => {
  const { user, system } = process.cpuUsage();
  printJson({ startup_cpu: (user + system) / 1e6 });
};

// Wait as the handler of W7 does; undefined without a wait.
export const wait = () => (spec.wait_ms ? new Promise((resolve) => setTimeout(resolve, spec.wait_ms)) : undefined);
export const waits = Boolean(spec.wait_ms);

const CONCURRENT_BATCHES = 2; // as in ../child.py

// Create the jobs of the spec in batches; print the duration, the due instant and the time of completion.
export async function create(write) {
  const now = Date.now();
  const clock = performance.now();
  const base = Math.trunc(now + spec.lead * 1000);
  const span = Math.trunc(spec.span * 1000);
  let next = spec.first;
  const end = spec.first + spec.n;
  const writeBatches = async () => {
    while (next < end) {
      const batch = [];
      for (const last = Math.min(next + spec.batch, end); next < last; next++)
        batch.push(payload(next, base + (span ? Math.floor(Math.random() * span) : 0)));
      await write(batch);
    }
  };
  await Promise.all(Array.from({ length: CONCURRENT_BATCHES }, writeBatches));
  printJson({ seconds: (performance.now() - clock) / 1000, due: base / 1000, created: Date.now() / 1000 });
}

// Create schedules with `concurrency` concurrent writes; print the duration.
export async function repeat(concurrency, write) {
  const clock = performance.now();
  for (let at = 0; at < spec.n; at += concurrency) {
    const numbers = Array.from({ length: Math.min(concurrency, spec.n - at) }, (_, k) => at + k);
    await Promise.all(numbers.map(write));
  }
  printJson({ seconds: (performance.now() - clock) / 1000, created: Date.now() / 1000 });
}

// Print `ready`, then the number of starts until standard input closes; then stop and write all starts to a file.
export function reportUntilClosed(stop) {
  let reported = 0;
  printJson({ ready: true });
  setInterval(() => {
    if (starts.length === reported) return;
    reported = starts.length;
    printJson({ count: reported / 3 });
  }, 10);
  process.stdin.resume();
  process.stdin.on("end", async () => {
    const limit = new Promise((resolve) => setTimeout(resolve, 4000));
    await Promise.race([Promise.resolve(stop()).catch((error) => console.error(error)), limit]);
    fs.writeFileSync(spec.out, Buffer.from(Float64Array.from(starts).buffer));
    process.exit(0);
  });
}
