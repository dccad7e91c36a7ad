"""Django settings: those of `startproject`, shortened."""

import os
from pathlib import Path

BASE_DIR = Path(__file__).parent.parent
SECRET_KEY = os.environ.get("SHOP_SECRET_KEY", "only-for-trying-it-out")
DEBUG = True
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "testserver"]
ROOT_URLCONF = "shop.urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

if "SHOP_DATABASE" in os.environ:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": os.environ["SHOP_DATABASE"],
            "USER": os.environ.get("SHOP_DATABASE_USER", "timebell"),
            "HOST": os.environ.get("SHOP_DATABASE_HOST", "127.0.0.1"),
            "PORT": os.environ.get("SHOP_DATABASE_PORT", "5432"),
        }
    }
else:
    file = os.environ.get("SHOP_DATABASE_FILE", BASE_DIR / "shop.sqlite3")
    # Without this, a transaction that reads before it writes fails if another connection writes in between.
    options = {"transaction_mode": "IMMEDIATE"}
    DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": file, "OPTIONS": options}}

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "timebell.integrations.django",
    "shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

TIMEBELL_APP = "shop.bell:bell"
TIMEBELL_DASHBOARD_URL = "http://127.0.0.1:8700/ui/"
