"""Images, audio and video that tools return: type detection, decoding, limits, and conversion to parts."""

from gateway.media.sniff import MediaError, media_from_bytes, sniff, to_data_uri
from gateway.media.to_parts import to_media, to_parts

__all__ = ["MediaError", "media_from_bytes", "sniff", "to_data_uri", "to_media", "to_parts"]
