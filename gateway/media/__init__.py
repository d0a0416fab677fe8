"""Whatever shows or sounds is known by its bytes, measured before it is decoded, and held once.

kind.py     bytes -> type, by their first ones
header.py   a picture's size, from its header alone
picture.py  pictures decoded and encoded; the one door to Pillow
film.py     frames out of a film, so many a second
sizes.py    the sides that a vision model takes
take.py     whatever a tool returns -> parts
admit.py    parts -> those that a policy is shown, and notes in place of the others
process.py  `process_image` and `process_video`, as vision trainers know them
"""

from gateway.media.kind import MediaError, data_uri, of_bytes, sniff
from gateway.media.take import to_medium, to_parts

__all__ = ["MediaError", "data_uri", "of_bytes", "sniff", "to_medium", "to_parts"]
