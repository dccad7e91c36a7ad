// Answers JSON lines {lib, spec, tz, start, count} with lists of instants in seconds, or an error.
import { createInterface } from 'node:readline';
import { createRequire } from 'node:module';

const require = createRequire(process.argv[2] + '/');
const { CronExpressionParser } = require('cron-parser');
const { Cron } = require('croner');

function instants({ lib, spec, tz, start, count }) {
  const found = [];
  if (lib === 'croner') {
    const job = new Cron(spec, { timezone: tz, mode: 'auto' });
    let at = new Date(start * 1000);
    while (found.length < count && (at = job.nextRun(at))) found.push(at.getTime() / 1000);
  } else {
    const expression = CronExpressionParser.parse(spec, { tz, currentDate: new Date(start * 1000) });
    while (found.length < count) found.push(expression.next().getTime() / 1000);
  }
  return found;
}

for await (const line of createInterface({ input: process.stdin })) {
  try {
    console.log(JSON.stringify(instants(JSON.parse(line))));
  } catch (error) {
    console.log(JSON.stringify({ error: String(error.message) }));
  }
}
