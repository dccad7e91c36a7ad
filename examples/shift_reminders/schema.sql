-- Two tables of an attendance system, independent of Timebell.
CREATE TABLE duty_schedules (
    id bigserial PRIMARY KEY,
    title text NOT NULL,
    assigned_user_id text NOT NULL,
    participants text[] NOT NULL DEFAULT '{}',
    start_at timestamptz NOT NULL,
    end_at timestamptz NOT NULL,
    status text NOT NULL DEFAULT 'active'
);

CREATE TABLE attendance_logs (
    id bigserial PRIMARY KEY,
    schedule_id bigint NOT NULL REFERENCES duty_schedules (id),
    user_id text NOT NULL,
    type text NOT NULL, -- check_in, check_out
    at timestamptz NOT NULL DEFAULT now()
);

CREATE INDEX ON attendance_logs (schedule_id, user_id, type);
