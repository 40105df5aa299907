"""A page embeds images of one folder, and nothing else that a row may name."""

import base64
import io
import os
import socket
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
from PIL import Image as Picture

from milvus_hubness.basics.files import opening
from milvus_hubness.reports.image_formats import image_in
from milvus_hubness.reports.images import LARGEST, Images

FORMATS = {"png": "PNG", "jpeg": "JPEG", "gif": "GIF", "webp": "WEBP"}
SECRET = b"token: s3cret"


def drawn(form, size=(9, 7), **options):
    """An image, as Pillow writes it."""
    content = io.BytesIO()
    picture = Picture.effect_noise(size, 60).convert("RGB")
    picture.save(content, form, **options)
    return content.getvalue()


VARIANTS = {
    "png": drawn("PNG"),
    "png, interlaced grey": drawn("PNG", (40, 40), compress_level=0),
    "jpeg": drawn("JPEG"),
    "jpeg, progressive": drawn("JPEG", (64, 64), progressive=True, quality=95),
    "jpeg, restarts": drawn("JPEG", (64, 64), restart_marker_blocks=1),
    "jpeg, comment": drawn("JPEG", comment=b"\xff\xd9 not the end"),
    "gif": drawn("GIF"),
    "gif, animated": drawn("GIF", save_all=True, append_images=[Picture.new("RGB", (9, 7), "red")]),
    "webp, lossy": drawn("WEBP"),
    "webp, lossless": drawn("WEBP", lossless=True),
    "webp, animated": drawn(
        "WEBP", save_all=True, append_images=[Picture.new("RGB", (9, 7), "red")]
    ),
}


@pytest.fixture
def folder(tmp_path):
    """A folder of images, and a file outside it."""
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "in").mkdir()
    (folder / "in" / "a b.png").write_bytes(VARIANTS["png"])
    (folder / "a.png").write_bytes(VARIANTS["png"])
    (tmp_path / "outside.png").write_bytes(VARIANTS["png"])
    return folder


@pytest.mark.parametrize("content", VARIANTS.values(), ids=VARIANTS)
def test_real_images_are_embedded_without_what_follows_them(folder, content, request):
    kind = request.node.callspec.id.partition(",")[0]
    image = image_in(content + SECRET)
    assert (image.subtype, image.content) == (kind, content)
    (folder / "x").write_bytes(content + SECRET)
    images = Images(folder)
    assert images.element("x", "7") == (
        f'<img src="data:image/{kind};base64,{base64.b64encode(content).decode()}" alt="Image of 7">'
    )
    assert images.remark is None


@pytest.mark.parametrize("content", VARIANTS.values(), ids=VARIANTS)
def test_no_part_of_an_image_is_an_image(content):
    for length in range(len(content) if len(content) < 2_000 else 2_000):
        assert image_in(content[:length]) is None


def riff(form, payload):
    return b"RIFF" + struct.pack("<I", 4 + len(payload)) + form + payload


def png(width, height):
    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def zipped():
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("x", SECRET)
    return content.getvalue()


NO_IMAGES = {
    "a text": SECRET,
    "nothing": b"",
    "a sound": riff(b"WAVE", b"fmt \x10\0\0\0" + bytes(16) + b"data\x04\0\0\0" + SECRET[:4]),
    "a film": riff(b"AVI ", bytes(100)),
    "any RIFF": riff(b"WEBP", b"LIST" + struct.pack("<I", len(SECRET) + 1) + SECRET + b"\0"),
    "the first bytes of a PNG": b"\x89PNG\r\n\x1a\n" + SECRET * 9,
    "the first bytes of a JPEG": b"\xff\xd8\xff\xe0" + SECRET * 9,
    "the first bytes of a GIF": b"GIF89a" + SECRET * 9,
    "an archive": zipped(),
    "a drawing": b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
    "a PNG with a broken sum": VARIANTS["png"][:-5] + b"\0" + VARIANTS["png"][-4:],
    "a PNG of ten thousand million pixels": png(100_000, 100_000),
    "a PNG without pixels": png(0, 9),
}


@pytest.mark.parametrize("content", NO_IMAGES.values(), ids=NO_IMAGES)
def test_other_files_are_left_out(folder, content):
    (folder / "x.png").write_bytes(content)
    images = Images(folder)
    assert images.element("x.png", "7") == ""
    assert images.left_out == 1
    data = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    assert images.element(data, "7") == ""


def test_a_png_of_a_few_million_pixels_is_one():
    assert image_in(png(5_000, 5_000)).subtype == "png"


def links(folder):
    outside = folder.parent / "outside.png"
    (folder / "out.png").symlink_to(outside)
    (folder / "up").symlink_to(folder.parent)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "inner.png").symlink_to(folder / "a.png")
    (folder / "inner").symlink_to("in")
    os.mkfifo(folder / "pipe.png")
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.path.relpath(folder / "socket.png"))
    server.close()
    (folder / "large.png").write_bytes(VARIANTS["png"] + bytes(LARGEST))
    return outside


def test_only_files_below_the_folder_are_read(folder, monkeypatch):
    outside = links(folder)
    monkeypatch.chdir(folder.parent)
    for reference in (
        *(
            "a.png",
            "in/a b.png",
            "in/../a.png",
            "./a.png",
            "inner.png",
            "inner/a b.png",
            str(folder / "a.png"),
        ),
        *((folder / "in" / "a b.png").as_uri(), f"file://localhost{folder}/a.png"),
    ):
        assert Images(folder).element(reference, "7").startswith("<img"), reference
        images = Images()
        assert images.element(reference, "7") == "", "without a folder, no file is read"
        assert images.remark.startswith(
            "1 image left out: files are shown only with --image-folder"
        )
    assert Images("images").element("a.png", "7").startswith("<img")
    left_out = (
        *("../outside.png", "in/../../outside.png", str(outside), outside.as_uri(), "outside.png"),
        *("out.png", "up/outside.png", "up/images/../outside.png", "loop", "loop/a.png"),
        *(
            "pipe.png",
            "socket.png",
            "in",
            ".",
            "",
            "/",
            "large.png",
            "none.png",
            "a.png/x",
            "a.png\0",
            "x" * 5_000,
        ),
        *(
            "/dev/zero",
            "/dev/tty",
            "/proc/kmsg",
            "/proc/self/environ",
            "/etc/passwd",
            "file://other.test/a.png",
        ),
        *(
            "javascript:alert(1)",
            "http://[",
            "http:///a.png",
            "https:a.png",
            "\ud800.png",
            "http://a/\ud800",
        ),
        *(
            "data:image/svg+xml;base64,PHN2Zy8+",
            "data:text/html,<b>",
            "data:",
            "data:image/png;base64,%%%",
        ),
        "data:image/png;base64," + "A" * 2 * LARGEST,
    )
    images = Images(folder)
    for number, reference in enumerate(left_out):
        assert images.element(reference, "7") == "", reference
        assert images.left_out == number + 1
    assert images.remark == (
        f"{len(left_out)} images left out: not a PNG, JPEG, GIF or WebP of up to 256 KiB below the image folder"
    )


def test_a_link_that_takes_the_place_of_a_file_meanwhile_is_not_followed(folder, monkeypatch):
    """Between the look at a path and its opening, someone replaces a file, or a folder on the way to it."""
    outside = folder.parent / "outside.png"
    resolve = Path.resolve

    def swap(place, target):
        def resolved(path, strict=False):
            found = resolve(path, strict=strict)
            if path == folder / "in" / "a b.png" and not place.is_symlink():
                os.rename(place, folder / "away")
                place.symlink_to(target)
            return found

        return resolved

    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a b.png").write_bytes(VARIANTS["png"])
    for place, target in ((folder / "in" / "a b.png", outside), (folder / "in", elsewhere)):
        assert opening.read_beneath(folder, "in/a b.png", LARGEST) == VARIANTS["png"]
        monkeypatch.setattr(Path, "resolve", swap(place, target))
        assert opening.read_beneath(folder, "in/a b.png", LARGEST) is None
        monkeypatch.setattr(Path, "resolve", resolve)
        place.unlink()
        os.rename(folder / "away", place)


def test_data_urls_and_addresses_load_nothing():
    images = Images()
    data = base64.b64encode(VARIANTS["gif"]).decode()
    assert images.element(f"data:image/png;base64,{data}", "7") == (
        f'<img src="data:image/gif;base64,{data}" alt="Image of 7">'
    )
    rel = 'rel="noopener noreferrer nofollow"'
    for reference, address, host in (
        ("https://shop.test/a b.png?x=1&y", "https://shop.test/a%20b.png?x=1&amp;y", "shop.test"),
        ("https://user:secret@shop.test/a.png", "https://***@shop.test/a.png", "shop.test"),
        (
            'http://shop.test/\u202egnp\x1b"><b>',
            "http://shop.test/%E2%80%AEgnp%1B%22%3E%3Cb%3E",
            "shop.test",
        ),
        ("https://sh\u043ep.test/", "https://sh%D0%BEp.test/", "xn--shp-ted.test"),
    ):
        assert (
            images.element(reference, "<7>")
            == f'<a href="{address}" {rel}>Image of &lt;7&gt;, at {host}</a>'
        )
    assert images.left_out == 0
