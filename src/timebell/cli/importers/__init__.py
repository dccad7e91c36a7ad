"""Import schedules from other schedulers: `timebell import apscheduler` and `timebell import celery`."""
