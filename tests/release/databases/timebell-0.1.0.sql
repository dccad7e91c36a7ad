BEGIN TRANSACTION;
CREATE TABLE timebell_audience_members (
	tenant_id VARCHAR(200) NOT NULL, 
	audience VARCHAR(200) NOT NULL, 
	device_id VARCHAR(36) NOT NULL, 
	generation INTEGER NOT NULL, 
	PRIMARY KEY (tenant_id, audience, device_id)
);
CREATE TABLE timebell_audiences (
	tenant_id VARCHAR(200) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	source TEXT NOT NULL, 
	generation INTEGER DEFAULT '0' NOT NULL, 
	loading INTEGER, 
	cursor TEXT, 
	until TEXT, 
	members BIGINT DEFAULT '0' NOT NULL, 
	refused BIGINT DEFAULT '0' NOT NULL, 
	refreshed_at BIGINT, 
	created_at BIGINT NOT NULL, 
	created_by VARCHAR(200), 
	updated_at BIGINT NOT NULL, 
	without_token BIGINT DEFAULT '0' NOT NULL, 
	PRIMARY KEY (tenant_id, name)
);
CREATE TABLE timebell_audit_exports (
	destination VARCHAR(20) NOT NULL, 
	position VARCHAR(36), 
	delivered_at BIGINT, 
	failing_since BIGINT, 
	error TEXT, 
	PRIMARY KEY (destination)
);
CREATE TABLE timebell_audit_log (
	id VARCHAR(36) NOT NULL, 
	tenant_id VARCHAR(200) NOT NULL, 
	at BIGINT NOT NULL, 
	actor VARCHAR(200) NOT NULL, 
	actor_kind VARCHAR(10) NOT NULL, 
	key_id VARCHAR(20), 
	address VARCHAR(64), 
	action VARCHAR(100) NOT NULL, 
	subject VARCHAR(200), 
	subject_name VARCHAR(200), 
	outcome VARCHAR(10) NOT NULL, 
	code VARCHAR(100), 
	suppressed INTEGER DEFAULT '0' NOT NULL, 
	"before" TEXT, 
	"after" TEXT, 
	request_id VARCHAR(36), 
	PRIMARY KEY (id)
);
CREATE TABLE timebell_calendars (
	tenant_id VARCHAR(200) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	version INTEGER NOT NULL, 
	definition TEXT NOT NULL, 
	created_at BIGINT NOT NULL, 
	PRIMARY KEY (tenant_id, name, version)
);
CREATE TABLE timebell_call_budgets (
	account VARCHAR(64) NOT NULL, 
	tenant_id VARCHAR(200) NOT NULL, 
	calls INTEGER NOT NULL, 
	resets_at BIGINT NOT NULL, 
	retry_at BIGINT, 
	PRIMARY KEY (account)
);
CREATE TABLE timebell_campaign_chunks (
	campaign_id VARCHAR(36) NOT NULL, 
	number INTEGER NOT NULL, 
	job_id VARCHAR(36) NOT NULL, 
	state VARCHAR(10) NOT NULL, 
	attempt INTEGER NOT NULL, 
	attempts_used INTEGER DEFAULT '0' NOT NULL, 
	posted_to VARCHAR(200) DEFAULT '' NOT NULL, 
	timezone VARCHAR(64), 
	size INTEGER NOT NULL, 
	accepted INTEGER DEFAULT '0' NOT NULL, 
	refused INTEGER DEFAULT '0' NOT NULL, 
	unknown INTEGER DEFAULT '0' NOT NULL, 
	unsent INTEGER DEFAULT '0' NOT NULL, 
	started_at BIGINT NOT NULL, 
	ended_at BIGINT, 
	PRIMARY KEY (campaign_id, number)
);
CREATE TABLE timebell_campaign_deliveries (
	campaign_id VARCHAR(36) NOT NULL, 
	recipient VARCHAR(200) NOT NULL, 
	chunk INTEGER NOT NULL, 
	state VARCHAR(8) NOT NULL, 
	code VARCHAR(100), 
	message_id TEXT, 
	sends SMALLINT DEFAULT '0' NOT NULL, 
	unknown_sends SMALLINT DEFAULT '0' NOT NULL, 
	variant VARCHAR(20), 
	opened_at BIGINT, 
	PRIMARY KEY (campaign_id, recipient)
);
CREATE TABLE timebell_campaigns (
	id VARCHAR(36) NOT NULL, 
	tenant_id VARCHAR(200) NOT NULL, 
	name VARCHAR(200), 
	spec TEXT NOT NULL, 
	state VARCHAR(12) NOT NULL, 
	reason TEXT, 
	send_at BIGINT NOT NULL, 
	timezone VARCHAR(64) NOT NULL, 
	schedule_id VARCHAR(36), 
	job_id VARCHAR(36), 
	next_chunk INTEGER DEFAULT '1' NOT NULL, 
	lanes TEXT, 
	cutoff BIGINT, 
	round INTEGER DEFAULT '0' NOT NULL, 
	open_chunks INTEGER DEFAULT '0' NOT NULL, 
	opened BIGINT DEFAULT '0' NOT NULL, 
	accepted BIGINT DEFAULT '0' NOT NULL, 
	refused BIGINT DEFAULT '0' NOT NULL, 
	unknown BIGINT DEFAULT '0' NOT NULL, 
	unsent BIGINT DEFAULT '0' NOT NULL, 
	expected BIGINT, 
	revision INTEGER DEFAULT '1' NOT NULL, 
	approved_by VARCHAR(200), 
	created_at BIGINT NOT NULL, 
	created_by VARCHAR(200), 
	updated_at BIGINT NOT NULL, 
	started_at BIGINT, 
	ended_at BIGINT, 
	excluded TEXT, 
	registered BIGINT, 
	all_opened BOOLEAN DEFAULT 0 NOT NULL, 
	possible_duplicates BIGINT DEFAULT '0' NOT NULL, 
	health TEXT, 
	pinned_at BIGINT, 
	archived_at BIGINT, 
	deleted_at BIGINT, 
	PRIMARY KEY (id)
);
CREATE TABLE timebell_connections (
	tenant_id VARCHAR(200) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	token_url TEXT NOT NULL, 
	client_id VARCHAR(200), 
	sealed TEXT NOT NULL, 
	version INTEGER DEFAULT '1' NOT NULL, 
	expires_at BIGINT, 
	renewed_at BIGINT NOT NULL, 
	unauthorized BOOLEAN DEFAULT 0 NOT NULL, 
	error TEXT, 
	renewing_until BIGINT, 
	created_at BIGINT NOT NULL, 
	created_by VARCHAR(200), 
	updated_at BIGINT NOT NULL, 
	PRIMARY KEY (tenant_id, name)
);
CREATE TABLE timebell_data_keys (
	tenant_id VARCHAR(200) NOT NULL, 
	wrapped_by VARCHAR(16) NOT NULL, 
	wrapped TEXT NOT NULL, 
	created_at BIGINT NOT NULL, 
	updated_at BIGINT NOT NULL, 
	PRIMARY KEY (tenant_id)
);
CREATE TABLE timebell_deployments (
	id VARCHAR(200) NOT NULL, 
	program VARCHAR(200) NOT NULL, 
	definitions INTEGER NOT NULL, 
	first_seen_at BIGINT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "timebell_deployments" VALUES('scripts@4f53cda18c2baa0c','scripts',0,1795982455089399);
CREATE TABLE timebell_devices (
	id VARCHAR(36) NOT NULL, 
	tenant_id VARCHAR(200) NOT NULL, 
	token TEXT NOT NULL, 
	token_hash VARCHAR(28) NOT NULL, 
	user_id VARCHAR(200), 
	platform VARCHAR(10), 
	gender VARCHAR(20), 
	age SMALLINT, 
	birth_date VARCHAR(10), 
	language VARCHAR(35), 
	timezone VARCHAR(64), 
	push_on BOOLEAN DEFAULT 1 NOT NULL, 
	marketing_on BOOLEAN, 
	topics TEXT DEFAULT '[]' NOT NULL, 
	attributes TEXT DEFAULT '{}' NOT NULL, 
	created_at BIGINT NOT NULL, 
	updated_at BIGINT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE timebell_finished (
	id VARCHAR(36) NOT NULL, 
	tenant_id VARCHAR(200) NOT NULL, 
	topic VARCHAR(200) NOT NULL, 
	schedule_id VARCHAR(36), 
	revision INTEGER, 
	kind VARCHAR(10) NOT NULL, 
	scheduled_at BIGINT NOT NULL, 
	run_at BIGINT NOT NULL, 
	timezone VARCHAR(64) NOT NULL, 
	payload TEXT NOT NULL, 
	metadata TEXT, 
	owner_id VARCHAR(200), 
	"key" VARCHAR(200), 
	target TEXT, 
	queue VARCHAR(100) NOT NULL, 
	priority SMALLINT NOT NULL, 
	retry TEXT, 
	timeout FLOAT, 
	expires_at BIGINT, 
	serial BOOLEAN NOT NULL, 
	state VARCHAR(10) NOT NULL, 
	attempt INTEGER NOT NULL, 
	attempts_used INTEGER NOT NULL, 
	node_id VARCHAR(36), 
	created_at BIGINT NOT NULL, 
	started_at BIGINT, 
	errors TEXT, 
	replaces VARCHAR(36), 
	local_time VARCHAR(32), 
	tzdata VARCHAR(20), 
	group_name VARCHAR(200), 
	manual_retries INTEGER DEFAULT '0' NOT NULL, 
	conditions TEXT, 
	finished_at BIGINT NOT NULL, 
	reason VARCHAR(200), 
	error TEXT, 
	error_code VARCHAR(100), 
	result TEXT, 
	cancel VARCHAR(12), 
	replaced_by VARCHAR(36), 
	skipped_count BIGINT DEFAULT '1' NOT NULL, 
	skipped_to BIGINT, 
	error_group VARCHAR(16)
);
INSERT INTO "timebell_finished" VALUES('01a228e5-717b-71a6-8fa8-53a763199ed7','default','upgrade.work',NULL,NULL,'once',1795982455163051,1795982455163051,'Europe/Berlin','"well"',NULL,NULL,NULL,NULL,'default',0,NULL,NULL,NULL,0,'completed',1,1,'01a228e5-70fd-75cf-8264-1642effb7dec',1795982455163051,1795982455220100,NULL,NULL,NULL,NULL,NULL,0,NULL,1795982455233663,NULL,NULL,NULL,'"done well"',NULL,NULL,1,NULL,NULL);
INSERT INTO "timebell_finished" VALUES('01a228e5-71a4-72da-9816-38a74c860ede','default','upgrade.work',NULL,NULL,'once',1795982455204966,1795982455204966,'Europe/Berlin','"fail"',NULL,NULL,NULL,NULL,'default',0,NULL,NULL,NULL,0,'failed',1,1,'01a228e5-70fd-75cf-8264-1642effb7dec',1795982455204966,1795982455220100,'[{"attempt":1,"due":"2026-11-29T20:00:55.204966+00:00","startedAt":"2026-11-29T20:00:55.220100+00:00","endedAt":"2026-11-29T20:00:55.234187+00:00","node":"01a228e5-70fd-75cf-8264-1642effb7dec","code":"ValueError","error":"ValueError: as requested (release_database.py:29 in work)","traceback":"Traceback (most recent call last):\n  File \"scripts/release_database.py\", line 29, in work\n    raise ValueError(\"as requested\")\nValueError: as requested\n","attemptsAllowed":1}]',NULL,NULL,NULL,NULL,0,NULL,1795982455234187,NULL,'ValueError: as requested (release_database.py:29 in work)','ValueError',NULL,NULL,NULL,1,NULL,'06b75f1abac1738c');
CREATE TABLE timebell_firings (
	trigger_id VARCHAR(36) NOT NULL, 
	item VARCHAR(200) NOT NULL, 
	step VARCHAR(20) NOT NULL, 
	recipient VARCHAR(200) NOT NULL, 
	tenant_id VARCHAR(200) NOT NULL, 
	at BIGINT, 
	job_id VARCHAR(36), 
	revision INTEGER NOT NULL, 
	fired_at BIGINT, 
	history TEXT, 
	not_fired VARCHAR(20), 
	detail TEXT, 
	not_fired_at BIGINT, 
	PRIMARY KEY (trigger_id, item, step, recipient)
);
CREATE TABLE timebell_idempotency_keys (
	tenant_id VARCHAR(200) NOT NULL, 
	"key" VARCHAR(255) NOT NULL, 
	request VARCHAR(64) NOT NULL, 
	status SMALLINT, 
	headers TEXT, 
	body TEXT, 
	created_at BIGINT NOT NULL, 
	PRIMARY KEY (tenant_id, "key")
);
CREATE TABLE timebell_items (
	source_id VARCHAR(36) NOT NULL, 
	"key" VARCHAR(200) NOT NULL, 
	tenant_id VARCHAR(200) NOT NULL, 
	version BIGINT NOT NULL, 
	fields TEXT, 
	updated_at BIGINT NOT NULL, 
	notified_at BIGINT, 
	problem TEXT, 
	PRIMARY KEY (source_id, "key")
);
CREATE TABLE timebell_jobs (
	id VARCHAR(36) NOT NULL, 
	tenant_id VARCHAR(200) NOT NULL, 
	topic VARCHAR(200) NOT NULL, 
	schedule_id VARCHAR(36), 
	revision INTEGER, 
	kind VARCHAR(10) NOT NULL, 
	scheduled_at BIGINT NOT NULL, 
	run_at BIGINT NOT NULL, 
	timezone VARCHAR(64) NOT NULL, 
	payload TEXT NOT NULL, 
	metadata TEXT, 
	owner_id VARCHAR(200), 
	"key" VARCHAR(200), 
	target TEXT, 
	queue VARCHAR(100) NOT NULL, 
	priority SMALLINT NOT NULL, 
	retry TEXT, 
	timeout FLOAT, 
	expires_at BIGINT, 
	serial BOOLEAN NOT NULL, 
	state VARCHAR(10) NOT NULL, 
	attempt INTEGER NOT NULL, 
	attempts_used INTEGER NOT NULL, 
	node_id VARCHAR(36), 
	created_at BIGINT NOT NULL, 
	started_at BIGINT, 
	errors TEXT, 
	replaces VARCHAR(36), 
	local_time VARCHAR(32), 
	tzdata VARCHAR(20), 
	group_name VARCHAR(200), 
	manual_retries INTEGER DEFAULT '0' NOT NULL, 
	conditions TEXT, 
	route VARCHAR(200) NOT NULL, 
	hold VARCHAR(10), 
	heartbeat BIGINT DEFAULT '0' NOT NULL, 
	cancel_requested BOOLEAN DEFAULT 0 NOT NULL, 
	progress TEXT, 
	shared BOOLEAN DEFAULT 0 NOT NULL, 
	charged BOOLEAN DEFAULT 0 NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "timebell_jobs" VALUES('01a228e5-71f0-7f07-996d-ef35d9ba893b','default','upgrade.work',NULL,NULL,'once',4102444800000000,4102444800000000,'UTC','"later"',NULL,NULL,'later',NULL,'default',0,NULL,NULL,NULL,0,'pending',0,0,NULL,1795982455280904,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,'upgrade.work',NULL,0,0,NULL,0,0);
CREATE TABLE timebell_keys (
	id VARCHAR(20) NOT NULL, 
	tenant_id VARCHAR(200), 
	name VARCHAR(200) NOT NULL, 
	role VARCHAR(10) NOT NULL, 
	scopes TEXT, 
	networks TEXT, 
	digest VARCHAR(64) NOT NULL, 
	created_at BIGINT NOT NULL, 
	created_by VARCHAR(200), 
	expires_at BIGINT, 
	last_used_at BIGINT, 
	revoked_at BIGINT, 
	PRIMARY KEY (id)
);
CREATE TABLE timebell_leaderships (
	fence BIGINT NOT NULL, 
	node_id VARCHAR(36) NOT NULL, 
	node VARCHAR(200) NOT NULL, 
	acquired_at BIGINT NOT NULL, 
	ended_at BIGINT, 
	resigned BOOLEAN DEFAULT 0 NOT NULL, 
	PRIMARY KEY (fence)
);
INSERT INTO "timebell_leaderships" VALUES(1,'01a228e5-70fd-75cf-8264-1642effb7dec','release',1795982455221272,1795982455278047,1);
CREATE TABLE timebell_leases (
	name VARCHAR(40) NOT NULL, 
	holder VARCHAR(36), 
	fence BIGINT DEFAULT '0' NOT NULL, 
	heartbeat BIGINT DEFAULT '0' NOT NULL, 
	acquired_at BIGINT, 
	alerts TEXT, 
	PRIMARY KEY (name)
);
INSERT INTO "timebell_leases" VALUES('leader',NULL,1,0,1795982455221272,NULL);
CREATE TABLE timebell_months (
	tenant_id VARCHAR(200) NOT NULL, 
	month VARCHAR(7) NOT NULL, 
	used BIGINT DEFAULT '0' NOT NULL, 
	PRIMARY KEY (tenant_id, month)
);
CREATE TABLE timebell_nodes (
	id VARCHAR(36) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	version VARCHAR(40) NOT NULL, 
	tzdata VARCHAR(20) NOT NULL, 
	routes TEXT NOT NULL, 
	heartbeat BIGINT DEFAULT '0' NOT NULL, 
	started_at BIGINT NOT NULL, 
	seen_at BIGINT NOT NULL, 
	draining BOOLEAN DEFAULT 0 NOT NULL, 
	slots INTEGER DEFAULT '0' NOT NULL, 
	running INTEGER DEFAULT '0' NOT NULL, 
	clock_ahead INTEGER DEFAULT '0' NOT NULL, 
	deployment VARCHAR(200), 
	secret_keys VARCHAR(200) DEFAULT '' NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE timebell_notifications (
	tenant_id VARCHAR(200) NOT NULL, 
	notification_id VARCHAR(500) NOT NULL, 
	device_id VARCHAR(36) NOT NULL, 
	accepted_at BIGINT NOT NULL, 
	PRIMARY KEY (tenant_id, notification_id, device_id)
);
CREATE TABLE timebell_operations (
	id VARCHAR(36) NOT NULL, 
	tenant_id VARCHAR(200) NOT NULL, 
	kind VARCHAR(20) NOT NULL, 
	state VARCHAR(10) NOT NULL, 
	spec TEXT NOT NULL, 
	cursor TEXT, 
	total BIGINT, 
	done BIGINT DEFAULT '0' NOT NULL, 
	failed BIGINT DEFAULT '0' NOT NULL, 
	skipped BIGINT DEFAULT '0' NOT NULL, 
	errors TEXT, 
	created_at BIGINT NOT NULL, 
	created_by VARCHAR(200), 
	updated_at BIGINT NOT NULL, 
	finished_at BIGINT, 
	PRIMARY KEY (id)
);
CREATE TABLE timebell_queues (
	name VARCHAR(100) NOT NULL, 
	concurrency INTEGER, 
	concurrency_per_group INTEGER, 
	rate INTEGER, 
	per FLOAT, 
	starts TEXT, 
	paused BOOLEAN DEFAULT 0 NOT NULL, 
	pause_reason TEXT, 
	PRIMARY KEY (name)
);
CREATE TABLE timebell_requests (
	tenant_id VARCHAR(200) NOT NULL, 
	request_id VARCHAR(200) NOT NULL, 
	job_id VARCHAR(36) NOT NULL, 
	PRIMARY KEY (tenant_id, request_id)
);
CREATE TABLE timebell_rewinds (
	id VARCHAR(36) NOT NULL, 
	node VARCHAR(200) NOT NULL, 
	detected_at BIGINT NOT NULL, 
	lost_from BIGINT NOT NULL, 
	lost_until BIGINT NOT NULL, 
	jobs INTEGER NOT NULL, 
	results INTEGER NOT NULL, 
	cancels INTEGER NOT NULL, 
	schedules INTEGER NOT NULL, 
	examples TEXT NOT NULL, 
	reapplied TEXT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE timebell_schedule_revisions (
	schedule_id VARCHAR(36) NOT NULL, 
	revision INTEGER NOT NULL, 
	tenant_id VARCHAR(200) NOT NULL, 
	recurrence TEXT NOT NULL, 
	action TEXT NOT NULL, 
	policies TEXT NOT NULL, 
	effective_at BIGINT NOT NULL, 
	PRIMARY KEY (schedule_id, revision)
);
INSERT INTO "timebell_schedule_revisions" VALUES('01a228e5-71f4-710d-9436-935a7b403e14',1,'default','{"anchor":"2026-11-29T20:00:55.284168Z","end":null,"kind":"interval","maxRuns":null,"spec":"PT1H","start":null,"timezone":"Europe/Berlin"}','{"expires_after":null,"metadata":{},"owner_id":null,"payload":"hourly","priority":0,"queue":"default","retry":null,"target":null,"timeout":null,"topic":"upgrade.work"}','{"catch_up":"latest","catch_up_limit":100,"catch_up_window":86400.0,"missed_after":60.0,"overlap":"skip"}',1795982455284168);
CREATE TABLE timebell_schedules (
	id VARCHAR(36) NOT NULL, 
	tenant_id VARCHAR(200) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	recurrence TEXT NOT NULL, 
	calendar VARCHAR(200), 
	target VARCHAR(200), 
	action TEXT NOT NULL, 
	policies TEXT NOT NULL, 
	enabled BOOLEAN DEFAULT 1 NOT NULL, 
	revision INTEGER DEFAULT '1' NOT NULL, 
	code_hash VARCHAR(64), 
	error TEXT, 
	next_fire_at BIGINT, 
	last_fired_at BIGINT, 
	created_at BIGINT NOT NULL, 
	updated_at BIGINT NOT NULL, 
	paused_at BIGINT, 
	pause_reason TEXT, 
	tzdata VARCHAR(20), 
	utc_offset INTEGER, 
	created_by VARCHAR(200), 
	deployment VARCHAR(200), 
	PRIMARY KEY (id)
);
INSERT INTO "timebell_schedules" VALUES('01a228e5-71f4-710d-9436-935a7b403e14','default','hourly','{"anchor":"2026-11-29T20:00:55.284168Z","end":null,"kind":"interval","maxRuns":null,"spec":"PT1H","start":null,"timezone":"Europe/Berlin"}',NULL,NULL,'{"expires_after":null,"metadata":{},"owner_id":null,"payload":"hourly","priority":0,"queue":"default","retry":null,"target":null,"timeout":null,"topic":"upgrade.work"}','{"catch_up":"latest","catch_up_limit":100,"catch_up_window":86400.0,"missed_after":60.0,"overlap":"skip"}',1,1,NULL,NULL,1795986055284168,NULL,1795982455284168,1795982455284168,NULL,NULL,'2026f',3600,NULL,NULL);
CREATE TABLE timebell_secrets (
	tenant_id VARCHAR(200) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	value TEXT NOT NULL, 
	version INTEGER NOT NULL, 
	created_at BIGINT NOT NULL, 
	created_by VARCHAR(200), 
	updated_at BIGINT NOT NULL, 
	PRIMARY KEY (tenant_id, name)
);
CREATE TABLE timebell_segments (
	tenant_id VARCHAR(200) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	filters TEXT NOT NULL, 
	created_at BIGINT NOT NULL, 
	created_by VARCHAR(200), 
	updated_at BIGINT NOT NULL, 
	PRIMARY KEY (tenant_id, name)
);
CREATE TABLE timebell_sessions (
	id VARCHAR(64) NOT NULL, 
	user_id VARCHAR(36), 
	key_id VARCHAR(20), 
	awaits_code BOOLEAN NOT NULL, 
	created_at BIGINT NOT NULL, 
	seen_at BIGINT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE timebell_sign_in_failures (
	user_id VARCHAR(36) NOT NULL, 
	credential VARCHAR(10) NOT NULL, 
	network VARCHAR(50) NOT NULL, 
	failures INTEGER NOT NULL, 
	last_failed_at BIGINT NOT NULL, 
	locked_until BIGINT, 
	PRIMARY KEY (user_id, credential, network)
);
CREATE TABLE timebell_source_webhooks (
	source_id VARCHAR(36) NOT NULL, 
	event VARCHAR(50) NOT NULL, 
	tenant_id VARCHAR(200) NOT NULL, 
	webhook_id VARCHAR(100) NOT NULL, 
	options TEXT NOT NULL, 
	created_at BIGINT NOT NULL, 
	PRIMARY KEY (source_id, event)
);
CREATE TABLE timebell_sources (
	id VARCHAR(36) NOT NULL, 
	tenant_id VARCHAR(200) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	kind VARCHAR(20) NOT NULL, 
	options TEXT NOT NULL, 
	cursor TEXT, 
	synced_at BIGINT, 
	error TEXT, 
	error_code VARCHAR(100), 
	orphaned_at BIGINT, 
	orphaned_reason TEXT, 
	created_at BIGINT NOT NULL, 
	created_by VARCHAR(200), 
	updated_at BIGINT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE timebell_targets (
	tenant_id VARCHAR(200) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	kind VARCHAR(20) NOT NULL, 
	options TEXT NOT NULL, 
	signing TEXT DEFAULT '[]' NOT NULL, 
	revision INTEGER DEFAULT '1' NOT NULL, 
	disabled_at BIGINT, 
	disabled_reason TEXT, 
	created_at BIGINT NOT NULL, 
	created_by VARCHAR(200), 
	updated_at BIGINT NOT NULL, 
	PRIMARY KEY (tenant_id, name)
);
CREATE TABLE timebell_tenants (
	id VARCHAR(200) NOT NULL, 
	created_at BIGINT NOT NULL, 
	limits TEXT, 
	starts TEXT, 
	timezone VARCHAR(64), 
	PRIMARY KEY (id)
);
INSERT INTO "timebell_tenants" VALUES('default',1795982454393261,NULL,NULL,NULL);
CREATE TABLE timebell_triggers (
	id VARCHAR(36) NOT NULL, 
	tenant_id VARCHAR(200) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	source_id VARCHAR(36) NOT NULL, 
	rule TEXT NOT NULL, 
	action TEXT NOT NULL, 
	enabled BOOLEAN DEFAULT 1 NOT NULL, 
	pause_reason TEXT, 
	revision INTEGER DEFAULT '1' NOT NULL, 
	created_at BIGINT NOT NULL, 
	created_by VARCHAR(200), 
	updated_at BIGINT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE timebell_usage (
	tenant_id VARCHAR(200) NOT NULL, 
	day VARCHAR(10) NOT NULL, 
	slot SMALLINT NOT NULL, 
	payload_bytes BIGINT DEFAULT '0' NOT NULL, 
	requests BIGINT DEFAULT '0' NOT NULL, 
	PRIMARY KEY (tenant_id, day, slot)
);
CREATE TABLE timebell_users (
	id VARCHAR(36) NOT NULL, 
	tenant_id VARCHAR(200), 
	name_tenant_id VARCHAR(200) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	role VARCHAR(10) NOT NULL, 
	password VARCHAR(200), 
	totp_secret VARCHAR(200), 
	totp_recovery_codes TEXT, 
	totp_enabled_at BIGINT, 
	totp_last_step BIGINT, 
	issuer VARCHAR(200), 
	subject VARCHAR(255), 
	created_at BIGINT NOT NULL, 
	created_by VARCHAR(200), 
	last_used_at BIGINT, 
	disabled_at BIGINT, 
	PRIMARY KEY (id)
);
CREATE TABLE timebell_version (
	version_num VARCHAR(32) NOT NULL, works_since VARCHAR(32), 
	CONSTRAINT timebell_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "timebell_version" VALUES('0001','0001');
CREATE TABLE timebell_workers (
	id VARCHAR(36) NOT NULL, 
	tenant_id VARCHAR(200), 
	name VARCHAR(200) NOT NULL, 
	routes TEXT NOT NULL, 
	slots INTEGER DEFAULT '0' NOT NULL, 
	heartbeat BIGINT DEFAULT '0' NOT NULL, 
	started_at BIGINT NOT NULL, 
	seen_at BIGINT NOT NULL, 
	draining BOOLEAN DEFAULT 0 NOT NULL, 
	claim_id VARCHAR(100), 
	claimed TEXT, 
	PRIMARY KEY (id)
);
CREATE TABLE timebell_zone_changes (
	tzdata VARCHAR(20) NOT NULL, 
	timezone VARCHAR(64) NOT NULL, 
	offset_before INTEGER NOT NULL, 
	offset_after INTEGER NOT NULL, 
	examined INTEGER NOT NULL, 
	schedules INTEGER NOT NULL, 
	jobs INTEGER NOT NULL, 
	since BIGINT, 
	recorded_at BIGINT NOT NULL, 
	PRIMARY KEY (tzdata, timezone, offset_before, offset_after)
);
CREATE INDEX timebell_audit_log_subject ON timebell_audit_log (tenant_id, subject, id);
CREATE INDEX timebell_audit_log_tenant ON timebell_audit_log (tenant_id, id);
CREATE INDEX timebell_finished_at ON timebell_finished (finished_at);
CREATE INDEX timebell_finished_dead ON timebell_finished (tenant_id, finished_at, id) WHERE state = 'failed' AND (reason IS NULL OR reason <> 'discarded');
CREATE INDEX timebell_finished_key ON timebell_finished (tenant_id, "key", id) WHERE key IS NOT NULL;
CREATE INDEX timebell_finished_missed ON timebell_finished (finished_at) WHERE state = 'skipped' AND reason IN ('missed', 'expired');
CREATE INDEX timebell_finished_id ON timebell_finished (id);
CREATE INDEX timebell_finished_owner ON timebell_finished (tenant_id, owner_id, id) WHERE owner_id IS NOT NULL;
CREATE INDEX timebell_finished_schedule ON timebell_finished (schedule_id, scheduled_at) WHERE schedule_id IS NOT NULL;
CREATE INDEX timebell_finished_tenant ON timebell_finished (tenant_id, state, id);
CREATE INDEX timebell_finished_topic ON timebell_finished (tenant_id, topic, id);
CREATE INDEX timebell_idempotency_keys_created_at ON timebell_idempotency_keys (created_at);
CREATE INDEX timebell_jobs_claim ON timebell_jobs (queue, priority, run_at) WHERE state = 'pending' AND hold IS NULL;
CREATE INDEX timebell_jobs_dispatched ON timebell_jobs (queue, heartbeat) WHERE state = 'dispatched';
CREATE INDEX timebell_jobs_group ON timebell_jobs (queue, tenant_id, group_name, priority, run_at) WHERE hold = 'group';
CREATE INDEX timebell_jobs_held ON timebell_jobs (hold, route) WHERE hold IS NOT NULL;
CREATE UNIQUE INDEX timebell_jobs_key ON timebell_jobs (tenant_id, "key") WHERE key IS NOT NULL;
CREATE INDEX timebell_jobs_local ON timebell_jobs (tzdata) WHERE local_time IS NOT NULL AND state = 'pending';
CREATE UNIQUE INDEX timebell_jobs_occurrence ON timebell_jobs (schedule_id, scheduled_at, kind) WHERE schedule_id IS NOT NULL;
CREATE INDEX timebell_jobs_of_tenant ON timebell_jobs (tenant_id, priority, run_at) WHERE hold = 'tenant';
CREATE INDEX timebell_jobs_owner ON timebell_jobs (tenant_id, owner_id, id) WHERE owner_id IS NOT NULL;
CREATE INDEX timebell_jobs_running ON timebell_jobs (queue) WHERE state = 'running';
CREATE INDEX timebell_jobs_shared ON timebell_jobs (queue, priority, tenant_id, run_at) WHERE state = 'pending' AND hold IS NULL AND shared;
CREATE INDEX timebell_jobs_tenant ON timebell_jobs (tenant_id, state, id) WHERE state <> 'running';
CREATE INDEX timebell_jobs_topic ON timebell_jobs (tenant_id, topic, id) WHERE state <> 'running';
CREATE INDEX timebell_keys_tenant ON timebell_keys (tenant_id, id);
CREATE INDEX timebell_operations_running ON timebell_operations (id) WHERE state = 'running';
CREATE INDEX timebell_operations_tenant ON timebell_operations (tenant_id, id);
CREATE INDEX timebell_rewinds_detected_at ON timebell_rewinds (detected_at);
CREATE INDEX timebell_schedules_calendar ON timebell_schedules (calendar) WHERE calendar IS NOT NULL;
CREATE INDEX timebell_schedules_deployment ON timebell_schedules (deployment) WHERE deployment IS NOT NULL;
CREATE INDEX timebell_schedules_due ON timebell_schedules (next_fire_at) WHERE enabled AND error IS NULL;
CREATE UNIQUE INDEX timebell_schedules_name ON timebell_schedules (tenant_id, name);
CREATE INDEX timebell_schedules_off ON timebell_schedules (enabled) WHERE NOT enabled OR error IS NOT NULL;
CREATE INDEX timebell_schedules_target ON timebell_schedules (tenant_id, target) WHERE target IS NOT NULL;
CREATE INDEX timebell_sessions_created_at ON timebell_sessions (created_at);
CREATE INDEX timebell_sign_in_failures_last ON timebell_sign_in_failures (last_failed_at);
CREATE INDEX timebell_sources_failing ON timebell_sources (id) WHERE (orphaned_at IS NOT NULL OR error IS NOT NULL);
CREATE UNIQUE INDEX timebell_sources_name ON timebell_sources (tenant_id, name);
CREATE INDEX timebell_targets_disabled ON timebell_targets (disabled_at) WHERE disabled_at IS NOT NULL;
CREATE UNIQUE INDEX timebell_users_name ON timebell_users (name_tenant_id, name);
CREATE UNIQUE INDEX timebell_users_identity ON timebell_users (issuer, subject);
CREATE INDEX timebell_devices_user ON timebell_devices (tenant_id, user_id) WHERE user_id IS NOT NULL;
CREATE INDEX timebell_devices_zone ON timebell_devices (tenant_id, timezone, id);
CREATE UNIQUE INDEX timebell_devices_token ON timebell_devices (token_hash);
CREATE INDEX timebell_devices_walk ON timebell_devices (tenant_id, id);
CREATE INDEX timebell_campaigns_live ON timebell_campaigns (state) WHERE ended_at IS NULL;
CREATE INDEX timebell_campaigns_tenant ON timebell_campaigns (tenant_id, id);
CREATE INDEX timebell_campaign_deliveries_chunk ON timebell_campaign_deliveries (campaign_id, chunk);
CREATE INDEX timebell_notifications_accepted_at ON timebell_notifications (accepted_at);
CREATE INDEX timebell_items_notified ON timebell_items (source_id, "key") WHERE notified_at IS NOT NULL;
CREATE INDEX timebell_items_problem ON timebell_items (source_id, "key") WHERE problem IS NOT NULL;
CREATE INDEX timebell_triggers_source ON timebell_triggers (source_id);
CREATE UNIQUE INDEX timebell_triggers_name ON timebell_triggers (tenant_id, name);
CREATE UNIQUE INDEX timebell_firings_job ON timebell_firings (job_id) WHERE job_id IS NOT NULL;
COMMIT;
