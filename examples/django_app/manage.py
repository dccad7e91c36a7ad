"""A Django shop with Timebell: orders and their reminders in one transaction; commands are `manage.py timebell ...`.

pip install "timebell[server]" django "psycopg[binary]"
export SHOP_DATABASE=shop                            # a PostgreSQL database; by default a SQLite file
python manage.py migrate
python manage.py timebell db upgrade
python manage.py runserver                          # the web server: creates jobs
python manage.py timebell run                       # the engine: runs jobs
"""

import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
    execute_from_command_line(sys.argv)
