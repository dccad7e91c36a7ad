// What the measured processes in Node share, as ../child.py does for those in Python.
import fs from "node:fs";
import { createRequire } from "node:module";

export const [, , command, url, words] = process.argv;
export const spec = JSON.parse(words);
export const need = createRequire(`${process.env.BENCH_NODE}/package.json`);
const starts = [];
const PAD = "x".repeat(60);

export const tell = (facts) => process.stdout.write(`${JSON.stringify(facts)}\n`);
export const payload = (number, due) => ({ i: number, due, pad: PAD });

// A handler started; `due` in milliseconds.
export const mark = (number, due) => starts.push(number, due / 1000, Date.now() / 1000);

const AT_ONCE = 2; // batches on their way, as in ../child.py

// Create the jobs of the spec in batches, and say when they are due and how long it took.
export async function create(write) {
  const now = Date.now();
  const clock = performance.now();
  const base = Math.trunc(now + spec.lead * 1000);
  const span = Math.trunc(spec.span * 1000);
  let next = spec.first;
  const end = spec.first + spec.n;
  const some = async () => {
    while (next < end) {
      const batch = [];
      for (const last = Math.min(next + spec.batch, end); next < last; next++)
        batch.push(payload(next, base + (span ? Math.floor(Math.random() * span) : 0)));
      await write(batch);
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, some));
  tell({ seconds: (performance.now() - clock) / 1000, due: base / 1000, created: Date.now() / 1000 });
}

// Write schedules, so many at once, and say how long it took.
export async function repeat(atOnce, write) {
  const clock = performance.now();
  for (let at = 0; at < spec.n; at += atOnce) {
    const some = Array.from({ length: Math.min(atOnce, spec.n - at) }, (_, k) => at + k);
    await Promise.all(some.map(write));
  }
  tell({ seconds: (performance.now() - clock) / 1000, created: Date.now() / 1000 });
}

// Ready; report the number of starts until standard input closes; then stop, and write them out.
export function working(stop) {
  let told = 0;
  tell({ ready: true });
  setInterval(() => {
    if (starts.length === told) return;
    told = starts.length;
    tell({ count: told / 3 });
  }, 10);
  process.stdin.resume();
  process.stdin.on("end", async () => {
    const limit = new Promise((resolve) => setTimeout(resolve, 4000));
    await Promise.race([Promise.resolve(stop()).catch((failed) => console.error(failed)), limit]);
    fs.writeFileSync(spec.out, Buffer.from(Float64Array.from(starts).buffer));
    process.exit(0);
  });
}
