export * from "./client.js";
export * from "./errors.js";
export { verifyWebhook, WebhookVerificationError } from "./webhooks.js";
export { JobFailure, Worker, type ClaimedJob, type Handler, type JobContext, type WorkerOptions } from "./worker.js";
export type { components, operations, paths } from "./schema.js";
