-- Records the keys of changed rows in timebell_changes, which Timebell reads. Review it, then run it as the owner.
CREATE TABLE IF NOT EXISTS timebell_changes (
    tx bigint NOT NULL DEFAULT txid_current(),
    id bigserial,
    channel text NOT NULL,
    key text NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tx, id)
);
CREATE INDEX IF NOT EXISTS timebell_changes_at ON timebell_changes (at);

CREATE OR REPLACE FUNCTION "shifts_duty_schedules_id"() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    changed text;
BEGIN
    FOR changed IN
        SELECT DISTINCT k FROM (VALUES
            (CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD."id") #>> '{}' END),
            (CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW."id") #>> '{}' END)
        ) AS keys (k) WHERE k IS NOT NULL
    LOOP
        INSERT INTO timebell_changes (channel, key) VALUES ('shifts', changed);
        PERFORM pg_notify('shifts', left(changed, 200));  -- the length is limited, longer keys are not used
    END LOOP;
    -- Keeps the outbox small: what Timebell has not read for 7 days is found by its next full read.
    DELETE FROM timebell_changes WHERE (tx, id) IN (
        SELECT tx, id FROM timebell_changes WHERE at < now() - interval '7 days' ORDER BY at LIMIT 10 FOR UPDATE SKIP LOCKED
    );
    RETURN NULL;
END
$$;
DROP TRIGGER IF EXISTS "shifts_duty_schedules_id" ON "duty_schedules";
CREATE TRIGGER "shifts_duty_schedules_id" AFTER INSERT OR UPDATE OR DELETE ON "duty_schedules" FOR EACH ROW EXECUTE FUNCTION "shifts_duty_schedules_id"();
