-- Notifies channel shifts of changed rows of duty_schedules. Review it, then run it as the owner.
CREATE OR REPLACE FUNCTION shifts_duty_schedules() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        PERFORM pg_notify('shifts', OLD.id::text);
    END IF;
    IF TG_OP <> 'DELETE' AND (TG_OP = 'INSERT' OR NEW.id IS DISTINCT FROM OLD.id) THEN
        PERFORM pg_notify('shifts', NEW.id::text);
    END IF;
    RETURN NULL;
END
$$;
DROP TRIGGER IF EXISTS shifts_duty_schedules ON duty_schedules;
CREATE TRIGGER shifts_duty_schedules AFTER INSERT OR UPDATE OR DELETE ON duty_schedules FOR EACH ROW EXECUTE FUNCTION shifts_duty_schedules();
-- To remove it: DROP TRIGGER shifts_duty_schedules ON duty_schedules; DROP FUNCTION shifts_duty_schedules();
