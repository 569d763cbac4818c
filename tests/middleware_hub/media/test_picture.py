"""Pictures: what is read of a file's header, judged by Pillow, with which engines read images; and what is refused."""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import struct
import zlib
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from middleware_hub.media.errors import MediaError, MediaInvalidError, MediaUrlError
from middleware_hub.media.picture import MAX_PIXELS, Picture, is_digest, make_picture, read_picture, undone

LIMIT = 20_000_000
FORMS = {
    "image/png": ("PNG", {}),
    "image/jpeg": ("JPEG", {}),
    "image/jpeg progressive": ("JPEG", {"progressive": True}),
    "image/gif": ("GIF", {}),
    "image/webp": ("WEBP", {}),
    "image/webp lossless": ("WEBP", {"lossless": True}),
    "image/bmp": ("BMP", {}),
}
TURNED = ["image/png", "image/jpeg", "image/jpeg progressive", "image/webp", "image/webp lossless"]


def encoded(form: str, width: int = 4, height: int = 3, orientation: int | None = None, **more: Any) -> bytes:
    kind, options = FORMS[form]
    if orientation is not None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        more["exif"] = exif
    out = io.BytesIO()
    Image.new("RGB", (width, height), (200, 10, 30)).save(out, kind, **options, **more)
    return out.getvalue()


def read(data: bytes) -> Picture:
    return read_picture(f"data:image/png;base64,{base64.b64encode(data).decode()}", LIMIT)


def png(width: int, height: int) -> bytes:
    """A PNG with the first of its pixels."""
    header = b"IHDR" + struct.pack(">II5B", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(header) + chunk(b"IDAT" + zlib.compress(bytes(99)))


def chunk(body: bytes) -> bytes:
    return struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))


@pytest.mark.parametrize("form", FORMS)
@given(width=st.integers(1, 500), height=st.integers(1, 500))
def test_type_and_size_are_those_that_pillow_reads(form: str, width: int, height: int) -> None:
    data = encoded(form, width, height)
    picture = read(data)
    seen = Image.open(io.BytesIO(data))
    assert (picture.width, picture.height) == seen.size
    assert picture.mime == Image.MIME[seen.format or ""] == form.split()[0]
    assert picture.data == data
    assert picture.digest == f"sha256:{sha256(data).hexdigest()}"
    assert picture.upright


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("form", TURNED)
def test_a_picture_is_upright_if_pillow_would_not_turn_it(form: str, orientation: int) -> None:
    data = encoded(form, 4, 3, orientation)
    seen = Image.open(io.BytesIO(data))
    seen.putpixel((0, 0), (0, 255, 0))
    turned = ImageOps.exif_transpose(seen)
    assert read(data).upright == ((turned.size, turned.tobytes()) == (seen.size, seen.tobytes()))
    assert (read(data).width, read(data).height) == (4, 3)  # as stored


@pytest.mark.parametrize("form", ["image/jpeg", "image/webp", "image/png"])
def test_an_orientation_in_xmp_counts(form: str) -> None:
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    if form == "image/png":
        text = b"XML:com.adobe.xmp\0\0\0\0\0" + xmp
        data = png(4, 3) + chunk(b"iTXt" + text)
    else:
        data = encoded(form, xmp=xmp)
    assert not read(data).upright


def test_a_damaged_note_does_not_damage_the_picture() -> None:
    data = encoded("image/jpeg", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x20")
    assert read(data).upright
    assert read(data).width == 4


def test_large_sizes_of_webp_and_gif_are_read() -> None:
    assert read(encoded("image/webp lossless", 16_383, 2)).width == 16_383
    assert read(encoded("image/gif", 40_000, 2)).width == 40_000
    scaled = bytearray(encoded("image/webp", 7, 5))
    scaled[27] |= 0xC0  # to be shown larger, which decoders leave out
    scaled[29] |= 0x40
    assert (read(bytes(scaled)).width, read(bytes(scaled)).height) == (7, 5)
    canvas = b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4)
    assert read(canvas + (99_999).to_bytes(3, "little") + (299).to_bytes(3, "little")).width == 100_000


def test_an_old_bmp_is_read() -> None:
    assert read(b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 7, 5, 1, 24) + bytes(99)).height == 5
    assert read(b"BM" + bytes(12) + struct.pack("<Iii", 40, 7, -5) + bytes(99)).height == 5


def loads(data: bytes) -> bool:
    """Whether Pillow decodes it, as engines do."""
    try:
        Image.open(io.BytesIO(data)).load()
    except (OSError, SyntaxError, EOFError, ValueError):
        return False
    return True


WHOLE = {
    **{form: (form, {}) for form in ("image/png", "image/jpeg", "image/gif", "image/webp", "image/bmp")},
    "progressive": ("image/jpeg", {"progressive": True}),
    "lossless": ("image/webp", {"lossless": True}),
    "with colours": ("image/gif", {"palette": "of the frame"}),
    "with a comment": ("image/gif", {"comment": b"a" * 700}),
}


def whole(name: str) -> bytes:
    """A picture with more than one colour, so that its pixels are most of it."""
    form, options = WHOLE[name]
    made = Image.effect_noise((24, 18), 80).convert("RGB")
    out = io.BytesIO()
    if "palette" in options:
        made.quantize(7).save(out, "GIF", append_images=[made.quantize(30)], save_all=True, loop=1)
    else:
        made.save(out, form.partition("/")[2], **options)
    return out.getvalue()


@pytest.mark.parametrize("name", WHOLE)
def test_a_picture_that_is_cut_off_is_refused_only_if_no_engine_can_load_it(name: str) -> None:
    """One without a pixel is refused in any case."""
    data = whole(name)
    read(data)
    ends = [*range(40, len(data), max(1, len(data) // 300)), *range(len(data) - 40, len(data))]
    refused = [end for end in ends if not _is_read(data[:end])]
    assert refused
    assert not [end for end in refused if loads(data[:end])]
    pixels = {"image/png": b"IDAT", "image/jpeg": b"\xff\xda", "image/bmp": data[54:]}.get(WHOLE[name][0], b"")
    assert not _is_read(data[: data.index(pixels) if pixels else 40])


@pytest.mark.parametrize("name", WHOLE)
def test_what_stands_behind_a_picture_does_not_matter(name: str) -> None:
    assert _is_read(whole(name) + b"more")


def _is_read(data: bytes) -> bool:
    try:
        read(data)
    except MediaInvalidError:
        return False
    return True


@pytest.mark.parametrize("form", FORMS)
def test_a_header_that_is_cut_off_is_refused_or_read_right(form: str) -> None:
    """Nothing else happens, wherever the file ends."""
    data = encoded(form, 5, 6, 6 if form in TURNED else None)
    refused = 0
    for end in range(len(data)):
        try:
            picture = read(data[:end])
        except MediaInvalidError:
            refused += 1
        else:
            assert (picture.width, picture.height) == (5, 6)
    assert refused > 8


@given(st.sampled_from(sorted(FORMS)), st.data())
def test_a_damaged_file_is_refused_or_read(form: str, data: st.DataObject) -> None:
    file = bytearray(encoded(form, 5, 6, 6 if form in TURNED else None))
    for at in data.draw(st.lists(st.integers(0, len(file) - 1), min_size=1, max_size=5)):
        file[at] = data.draw(st.integers(0, 255))
    try:
        picture = read(bytes(file))
    except MediaInvalidError:
        return
    assert 0 < picture.width * picture.height <= MAX_PIXELS


@given(st.sampled_from((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF    WEBP", b"BM", b"")), st.binary())
def test_other_bytes_are_refused_or_read(magic: bytes, rest: bytes) -> None:
    with contextlib.suppress(MediaInvalidError):
        make_picture(magic + rest, LIMIT)


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (2**31, 2**31), (MAX_PIXELS + 1, 1)])
def test_a_size_that_no_engine_takes_is_refused(width: int, height: int) -> None:
    with pytest.raises(MediaInvalidError):
        read(png(width, height))


def test_the_largest_size_is_taken() -> None:
    assert read(png(MAX_PIXELS, 1)).width == MAX_PIXELS


SMALL = encoded("image/png")
TEXT = base64.b64encode(SMALL).decode()


@pytest.mark.parametrize(
    "given",
    [
        f"data:image/png;base64,{TEXT}",
        f"DATA:text/plain;charset=utf-8;BASE64,{TEXT}",
        f"data:;base64,{TEXT}",
        TEXT,
        base64.encodebytes(SMALL).decode(),
        f" \t{TEXT}\r\n\f\v",
    ],
)
def test_forms_of_the_same_bytes_are_the_same_picture(given: str) -> None:
    found, plain = read_picture(given, LIMIT), read(SMALL)
    assert found.data_url == plain.data_url
    assert found == plain


@pytest.mark.parametrize(
    "given",
    [
        "",
        "data:",
        "data:image/png;base64",
        "data:image/png;base64,",
        f"data:image/png,{TEXT}",
        f"data:image/png;base64,{TEXT[:20]}%2B{TEXT[20:]}",
        f"data:image/png;base64,{TEXT[:20]}\xa0{TEXT[20:]}",
        f"data:image/png;base64,{TEXT[:20]}\ud800",
        f"{TEXT[:20]}-_{TEXT[20:]}",
        f"{TEXT}=",
        f"{TEXT}====",
        f"={TEXT}",
        TEXT.rstrip("=")[:-1],
        TEXT[:13],
        base64.b64encode(b"no image at all").decode(),
        base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg'/>").decode(),
        "sha256:" + "A" * 64,
    ],
)
def test_what_is_no_image_is_refused(given: str) -> None:
    with pytest.raises(MediaInvalidError) as refused:
        read_picture(given, LIMIT)
    assert refused.value.body()["error"]["code"] == "media_invalid"  # type: ignore[index]


@pytest.mark.parametrize(
    "given",
    [
        *("http://a/b.png", "https://a/b.png", "HTTPS://a", "file:///etc/passwd", "s3://bucket/key", "C:\\a.png"),
        *("/tmp/a.png", "/tmp/pic", "./a", "../a.png", "~/a.png", "a.jpeg", "folder/a.png", "\\\\host\\a"),
    ],
)
def test_an_address_or_a_path_is_refused_as_one(given: str) -> None:
    with pytest.raises(MediaUrlError):
        read_picture(given, LIMIT)


def test_base64_that_begins_like_a_path_is_no_path() -> None:
    data = encoded("image/jpeg")
    text = base64.b64encode(data).decode()
    assert text.startswith("/9j/")
    assert read_picture(text, LIMIT).data == data


@pytest.mark.parametrize("broken", [False, True])
def test_a_long_picture_is_read_in_steps(broken: bool) -> None:
    """Padding ends base64, wherever a step ends."""
    data = SMALL + bytes(range(256)) * 3000
    text = base64.b64encode(data).decode()
    given = "\n".join(text[at : at + 76] for at in range(0, len(text), 76)) if broken else text
    found = read_picture(f"data:image/png;base64,{given}", 1_000_000)
    assert (found.data, found.data_url) == (data, b"data:image/png;base64," + text.encode())
    for step in (1 << 18, 1 << 19):
        for wrong in (text[: step - 1] + "=" + text[step:], text[: step - 2] + "==" + text[step:]):
            with pytest.raises(MediaInvalidError):
                read_picture(wrong, 1_000_000)


@given(st.binary(max_size=30), st.text('Az09+/=\\\\"\n _-', max_size=3), st.integers(0, 40), st.integers(0, 3))
def test_what_binascii_takes_for_base64_is_base64(data: bytes, foreign: str, at: int, cut: int) -> None:
    """In the right place, or in the wrong one: the same bytes, or an error for both."""
    text = base64.b64encode(data)
    given = text[:at] + foreign.encode() + text[at + cut :]
    try:
        expected = binascii.a2b_base64(given, strict_mode=True)
    except binascii.Error:
        with pytest.raises(binascii.Error):
            undone(memoryview(given))
    else:
        assert undone(memoryview(given)) == expected


@pytest.mark.parametrize("escaped", [b"a\\/01", b"Cuu\\/", b"A\\/B=", b"\\u0041AAA", b"AAAA\\n"])
def test_an_escape_of_json_is_no_base64(escaped: bytes) -> None:
    with pytest.raises(binascii.Error):
        undone(memoryview(escaped))


def test_the_limit_is_that_of_the_file() -> None:
    broken = base64.encodebytes(SMALL).decode()
    for text in (TEXT, broken):
        assert read_picture(text, len(SMALL)).data == SMALL
        with pytest.raises(MediaInvalidError, match="larger than"):
            read_picture(text, len(SMALL) - 1)
    with pytest.raises(MediaInvalidError, match="larger than"):
        read_picture("A" * 1_000, 100)


def test_the_data_url_is_made_once_and_counted() -> None:
    picture = read(SMALL)
    before = picture.held_bytes
    assert picture.data_url == b"data:image/png;base64," + TEXT.encode()
    assert picture.data_url is picture.data_url
    assert picture.held_bytes == before == len(SMALL) + len(picture.data_url)
    assert read(SMALL).digest == picture.digest


@pytest.mark.parametrize(
    ("given", "is_one"),
    [
        ("sha256:" + "0a" * 32, True),
        ("sha256:" + "0A" * 32, False),
        ("sha256:" + "0a" * 31, False),
        ("sha256:" + "0a" * 32 + "\n", False),
        ("0a" * 32, False),
    ],
)
def test_a_digest_has_one_form(given: str, is_one: bool) -> None:
    assert is_digest(given) is is_one


def test_every_error_has_a_word_of_its_own() -> None:
    words = [kind.code for kind in MediaError.__subclasses__()]
    assert len(set(words)) == len(words) == 11
    error = MediaInvalidError("why", param="image_data")
    assert error.body()["error"] == {
        "message": "why",
        "type": "invalid_request_error",
        "code": "media_invalid",
        "param": "image_data",
    }
