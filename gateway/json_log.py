"""Log records as JSON, one a line, for programs that collect logs."""

from __future__ import annotations

import json
import logging
import time


class JsonFormatter(logging.Formatter):
    """`time` (UTC), `level`, `logger`, `message`, the fields of an audit line, and `exception` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{at}.{record.msecs:03.0f}Z", "level": record.levelname, "logger": record.name}
        line |= {"message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
