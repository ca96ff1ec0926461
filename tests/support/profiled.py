"""What a profile's events tell, in each version of PyTorch."""

import json


def metadata(event):
    if getattr(event, "_metadata_json", None):
        return json.loads("{" + event._metadata_json.strip("{}") + "}")
    told = (event.metadata or {}).items()  # from PyTorch 2.15 on; numbers are text there
    return {name: int(value) if value.isdecimal() else value for name, value in told}
