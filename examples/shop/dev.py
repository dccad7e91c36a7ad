"""The shop with an emulator of Firebase instead of real phones: `timebell dev dev.py`.

pip install ./packages/timebell-fcm-emulator
"""

import os

from timebell_fcm_emulator import FakeFcm

fcm = FakeFcm().__enter__()
os.environ |= {"TIMEBELL_FCM_CREDENTIALS": fcm.credentials, "TIMEBELL_FCM_URL": fcm.url, "SSL_CERT_FILE": fcm.ca}

from shop.jobs import bell as app  # noqa: E402, F401  (it reads the variables)
