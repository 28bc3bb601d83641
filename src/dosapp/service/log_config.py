"""Logging of a service process: text or JSON lines on stderr.

Loggers are `dosapp.service.http` (one line per request), `dosapp.service.reader` and
`dosapp.service.writer`. A record may carry `extra={"fields": {…}}`: JSON lines have these as keys.
"""

import datetime
import json
import logging
import sys
import warnings

from dosapp.service.settings import ServiceSettings

UNHEARD = ("PIL", "python_multipart")  # they warn of damaged uploads, as answers do


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record with its fields and its traceback, if it has one."""
        line = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000+00:00 INFO dosapp.service.http: POST /predict 200 …`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """Format the time as in JSON lines."""
        return _timestamp(record)


def configure_logging(settings: ServiceSettings) -> None:
    """Send the log lines of the service and of all packages, and Python's warnings, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else TextFormatter())
    logging.captureWarnings(True)
    # Pillow warns of damaged files with numbers out of them, so every upload could add a line, and
    # Python would remember each. The answer to the request tells what is wrong.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    for name in UNHEARD:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger().handlers = [handler]
    logging.getLogger("dosapp.service").setLevel(settings.log_level.upper())


def _timestamp(record: logging.LogRecord) -> str:
    time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return time.isoformat(timespec="milliseconds")
