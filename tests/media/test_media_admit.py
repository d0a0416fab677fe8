"""A policy is shown what is sound and within its bounds, and of everything else it reads why it was left out."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from threading import Thread, current_thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from gateway.config.models import MediaLimits
from gateway.media import admit as room
from gateway.media.admit import LOST, Admission, Store
from gateway.media.film import SHOWN, Sampling, Seen, frames
from gateway.types import Audio, Image, Part, Resource, Text, ToolResult, Video
from tests.drawn import COLORS, SVG, bomb, moving, plain, png, saved, seen, truncated

JPEG = saved(plain(20, 10), "JPEG")


def shown(*parts: Part, **limits: Any) -> tuple[Part, ...]:
    return Admission(MediaLimits(**limits)).admitted(parts).parts


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Image(bomb()), "31623x31623 pixels, more than 64000000"),
        (Image(bomb(9000, 9000)), "9000x9000 pixels, more than 64000000"),
        (Image(truncated()), "(?i)not a readable picture: .*truncated"),
        (Image(JPEG[:-40]), "(?i)not a readable picture: .*truncated"),
        (Image(b"\x89PNG\r\n\x1a\nnothing"), "not a readable picture"),
        (Image(png()[:20]), "it ends within its header"),
        (Image(SVG, "image/svg+xml"), "SVG is a drawing in words, not a picture of pixels; render it to one of png"),
        (Image(SVG, "image/png"), "SVG is a drawing"),
        (Image(b"<html><svg>", "image/png"), "11 bytes that are none of png, jpeg, webp, gif, bmp"),
        (Image(b"", "image/png"), "0 bytes that are none"),
        (Image(b"\0\0\0\x18ftypisom", "image/png"), "video/mp4 is none of"),
        (Image(saved(plain(), "TIFF"), "image/png"), "image/tiff is none of"),
        (Image(b"%!PS-Adobe-3.0 EPSF", "image/png"), "bytes that are none of"),
        (Image(png() + bytes(33 * 1024 * 1024)), "bytes, more than 33554432"),
        (Audio(bytes(33 * 1024 * 1024)), "bytes, more than 33554432"),
        (Resource("a", "image/png", data=bomb()), "31623x31623 pixels"),
        (Resource("a", "image/svg+xml", data=SVG), "SVG is a drawing"),
        (Video(bomb(), "video/webp"), "31623x31623 pixels"),
    ],
)
def test_what_may_not_pass_leaves_a_note_in_its_place(part: Part, words: str) -> None:
    kept, lost = Admission().admitted([Text("a"), part, Text("b")])
    assert lost == 1 and [type(one) for one in kept] == [Text, Text, Text]
    assert isinstance(kept[1], Text) and kept[1].text.startswith(f"[{type(part).__name__.lower()} left out: ")
    assert re.search(words, kept[1].text)


def test_a_bomb_is_never_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*args: object, **options: object) -> None:
        raise AssertionError("it was opened")

    monkeypatch.setattr(Pillow, "open", opened)
    for data in (bomb(), bomb(100_000, 10_000), saved(plain(), "GIF")[:6] + b"\xff\xff\xff\xff"):
        (part,) = shown(Image(data))
        assert isinstance(part, Text) and "pixels, more than" in part.text


@pytest.mark.parametrize("declared", ["image/png", "image/webp", "text/html", ""])
def test_the_bytes_tell_the_type_and_not_who_sent_them(declared: str) -> None:
    assert shown(Image(JPEG, declared)) == (Image(JPEG, "image/jpeg"),)
    assert shown(Audio(JPEG, "audio/wav")) == (Image(JPEG, "image/jpeg"),)


def test_a_document_that_is_a_picture_is_shown_as_one_and_others_pass() -> None:
    document = Resource("file:///a.pdf", "application/pdf", data=b"%PDF")
    link = Resource("https://example.org/a.png", "image/png")
    sound = Audio(b"RIFF\0\0\0\0WAVE")
    parts = shown(Resource("file:///a.png", "image/png", data=png()), document, link, sound)
    assert parts == (Image(png()), document, link, sound)


@pytest.mark.parametrize("declared", [None, "", "application/octet-stream"])
def test_a_document_of_no_known_type_is_known_by_its_bytes(declared: str | None) -> None:
    assert shown(Resource("file:///chart", declared, data=JPEG)) == (Image(JPEG, "image/jpeg"),)
    kept, lost = Admission().admitted([Resource("file:///chart", declared, data=truncated())])
    assert lost == 1 and isinstance(kept[0], Text) and kept[0].text.startswith("[resource left out: not a readable")


def test_a_picture_passes_untouched_where_no_size_is_asked_for() -> None:
    for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        data = saved(plain(40, 30), form)
        assert shown(Image(data)) == (Image(data, f"image/{form.lower()}"),)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_shown_as_it_begins_and_the_text_says_so(form: str) -> None:
    picture, told = shown(Image(moving(form)))
    assert isinstance(picture, Image) and picture.mime == "image/png"
    assert seen(picture.data).getpixel((0, 0)) == (255, 0, 0) and seen(picture.data).n_frames == 1
    assert told == Text("[the image is animated: this is how it begins]")


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animation_may_be_several_pictures(form: str) -> None:
    told, *pictures = shown(Image(moving(form, 8, duration_ms=250)), animated="frames", fps=1.0)
    assert told == Text("[a film of 2 s: 2 of its 8 frames, evenly spread]")
    colors = [seen(one.data).convert("RGB").getpixel((0, 0)) for one in pictures if isinstance(one, Image)]
    assert colors == [(255, 0, 0), Pillow.new("RGB", (1, 1), COLORS[7 % 6]).getpixel((0, 0))]


def test_an_animation_may_be_a_film_and_a_film_may_be_pictures() -> None:
    assert shown(Image(moving()), animated="film") == (Video(moving(), "video/gif"),)
    film = Video(moving("WEBP", 3, duration_ms=1000), "video/webp")
    assert shown(film) == (film,)
    assert [type(part) for part in shown(film, films="frames", max_frames=2)] == [Text, Image, Image]


FILM = Video(moving("WEBP", 12, (640, 360), duration_ms=500), "video/webp")


def pictures_of(film: Part) -> list[Pillow.Image]:
    """Of a film, as trainers look at it."""
    assert isinstance(film, Video)
    return list(frames(film.data, Sampling(min_frames=1, max_frames=SHOWN)).pictures)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_a_film_that_stays_one_is_as_long_and_as_large_as_is_asked_for(form: str) -> None:
    data = moving(form, 12, (640, 360), duration_ms=500)
    for part, animated in ((Video(data, f"video/{form.lower()}"), "first"), (Image(data), "film")):
        (film,) = shown(part, animated=animated, most_images=4, max_pixels=3136)
        seen = pictures_of(film)
        assert [one.size for one in seen] == [(56, 28)] * 4
        assert [one.getpixel((0, 0)) for one in seen] == [
            Pillow.new("RGB", (1, 1), COLORS[place % 6]).getpixel((0, 0)) for place in (0, 4, 7, 11)
        ]
    assert len(pictures_of(*shown(FILM, max_frames=2))) == 2
    assert pictures_of(*shown(FILM, max_pixels=3136))[0].size == (56, 28)
    assert pictures_of(*shown(FILM, min_pixels=320_000))[0].size == (756, 448)


def test_a_film_within_its_limits_is_the_same_bytes() -> None:
    assert shown(FILM) == shown(FILM, most_images=12) == shown(FILM, max_pixels=640 * 360, max_frames=12) == (FILM,)


def test_a_film_is_no_way_around_a_wish_for_no_pictures() -> None:
    (note,) = shown(FILM, most_images=0)
    assert note == Text("[video left out: at most 0 images of one result are shown]")


def test_pictures_beyond_the_limit_are_named_where_the_first_of_them_stood() -> None:
    album = [part for place in range(50) for part in (Text(str(place)), Image(png(place + 1, 1)))]
    kept, lost = Admission().admitted(album)
    assert lost == 34
    assert [seen(part.data).width for part in kept if isinstance(part, Image)] == list(range(1, 17))
    assert kept[33] == Text("[34 more images left out: at most 16 of one result are shown]")
    assert [part for part in kept if isinstance(part, Text)][:17] == [Text(str(place)) for place in range(17)]
    assert sum(isinstance(part, Text) for part in kept) == 51


def test_no_pictures_at_all_may_be_asked_for() -> None:
    assert shown(Text("a"), Image(png()), Text("b"), most_images=0) == (
        Text("a"),
        Text("[1 more image left out: at most 0 of one result are shown]"),
        Text("b"),
    )


def test_a_picture_may_be_made_to_fit() -> None:
    (small,) = shown(Image(png(1000, 500)), max_pixels=28 * 28 * 16)
    (large,) = shown(Image(png(10, 20)), min_pixels=32 * 32 * 8, factor=32)
    assert isinstance(small, Image) and seen(small.data).size == (140, 56)
    assert isinstance(large, Image) and seen(large.data).size == (64, 128)
    assert shown(small, max_pixels=28 * 28 * 16) == (small,)


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(
            [Text("a"), Image(png()), Image(JPEG), Image(truncated()), Image(bomb()), Image(SVG), Image(moving())]
        ),
        max_size=12,
    ),
    most=st.integers(0, 4),
)
def test_whatever_a_tool_answers_nothing_is_lost_without_a_word(parts: list[Part], most: int) -> None:
    kept, lost = Admission(MediaLimits(most_images=most)).admitted(parts)
    images = [part for part in kept if isinstance(part, Image)]
    assert len(images) <= most and len(images) + lost == sum(isinstance(part, Image) for part in parts)
    assert [part for part in kept if part == Text("a")] == [part for part in parts if part == Text("a")]
    assert ("left out" in " ".join(part.text for part in kept if isinstance(part, Text))) == (lost > 0)


async def test_a_result_counts_what_was_left_out_and_is_the_same_where_nothing_was() -> None:
    admit = Admission()
    text = ToolResult((Text("a"),))
    assert await admit(text) is text
    assert (await admit(ToolResult((Image(png()),), metrics={"a": 1}))).metrics == {"a": 1}
    refused = await admit(ToolResult((Image(bomb()), Text("a")), metrics={"a": 1, LOST: 2}))
    assert refused.metrics == {"a": 1, LOST: 3}
    claimed = await admit(ToolResult((Image(bomb()),), metrics={LOST: "many"}))
    assert claimed.metrics == {LOST: 1}


async def test_a_large_picture_is_looked_at_in_a_thread_and_comes_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Callable[..., Any]] = []
    run_sync = room.to_thread.run_sync

    async def noted(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        ran.append(function)
        return await run_sync(function, *args, **options)

    monkeypatch.setattr(room.to_thread, "run_sync", noted)
    admit = Admission()
    for picture, threads in ((Image(png()), 0), (Image(png(600, 600)), 1), (Image(png(600, 600)), 2)):
        assert await admit.parts((picture,)) == ((picture,), 0)
        assert len(ran) == threads


async def test_an_animation_is_walked_over_in_a_thread_however_small_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[Thread] = []

    def noted(*args: Any) -> Seen:
        walked.append(current_thread())
        return frames(*args)

    monkeypatch.setattr(room, "frames", noted)
    for form in ("GIF", "WEBP", "PNG"):
        parts, lost = await Admission(MediaLimits(animated="frames")).parts((Image(moving(form)),))
        assert [type(part) for part in parts] == [Text, Image] and not lost
    assert len(walked) == 3 and current_thread() not in walked


def test_equal_pictures_lie_in_memory_once_and_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    one, other = Admission(MediaLimits(), store), Admission(MediaLimits(most_images=1), store)
    first = one.admitted([Image(bytes(bytearray(png())))]).parts[0]
    monkeypatch.setattr("gateway.media.admit.opened", None)
    second = other.admitted([Image(bytes(bytearray(png())))]).parts[0]
    assert first is second and len(store) == 1
    del first, second
    gc.collect()
    assert len(store) == 0
