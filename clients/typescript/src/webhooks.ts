import { createHmac, timingSafeEqual } from "node:crypto";

const TOLERANCE_SECONDS = 300;

/** A webhook whose signature is missing, wrong or too old. */
export class WebhookVerificationError extends Error {
  override name = "WebhookVerificationError";
}

type Headers = Record<string, string | string[] | undefined> | { get(name: string): string | null };

/**
 * Verify a webhook of Timebell (Standard Webhooks 1.0), and return its parsed body.
 *
 * `body` is the text or the bytes as received. `secrets` are one or more `whsec_...`, several during a rotation.
 */
export function verifyWebhook<Body = unknown>(
  body: string | Uint8Array,
  headers: Headers,
  secrets: string | string[],
  now: Date = new Date(),
): Body {
  const read = (name: string) => {
    const value = typeof headers.get === "function" ? headers.get(name) : (headers as Record<string, string>)[name];
    if (typeof value !== "string") throw new WebhookVerificationError(`The header ${name} is missing.`);
    return value;
  };
  const [id, timestamp, signatures] = [read("webhook-id"), read("webhook-timestamp"), read("webhook-signature")];
  if (!(Math.abs(now.getTime() / 1000 - Number(timestamp)) <= TOLERANCE_SECONDS)) {
    throw new WebhookVerificationError("The webhook is too old or from the future.");
  }
  const presented = signatures.split(" ").map((each) => Buffer.from(each));
  const isValid = [secrets].flat().some((secret) => {
    const key = Buffer.from(secret.replace(/^whsec_/, ""), "base64");
    const digest = createHmac("sha256", key).update(`${id}.${timestamp}.`).update(body).digest("base64");
    const expected = Buffer.from(`v1,${digest}`);
    return presented.some((each) => each.length === expected.length && timingSafeEqual(each, expected));
  });
  if (!isValid) throw new WebhookVerificationError("The signature does not match.");
  return JSON.parse(typeof body === "string" ? body : Buffer.from(body).toString("utf8")) as Body;
}
