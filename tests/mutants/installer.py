"""The installer."""

from __future__ import annotations

from mutant import Mutant

ARCHIVE = "tests/tools/test_install_archive.py"
DISK = "tests/tools/test_install_disk.py"
INSTALL = "tests/tools/test_install.py"
TOGETHER = "tests/tools/test_install_together.py"
NETWORK = "tests/tools/test_install_network.py"
WINDOWS = "tests/tools/test_install_windows.py"

MUTANTS = (
    Mutant(
        "installer",
        "a download's hash is checked",
        "kernels/install/download.py",
        *("if hashlib.sha256(data).hexdigest() == wheel.sha256:", "if True:"),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "a file's hash is checked",
        "kernels/install/places.py",
        *("or hashlib.sha256(data).hexdigest() != wheel.sha256", ""),
        (
            INSTALL,
            TOGETHER,
        ),
    ),
    Mutant(
        "installer",
        "a web page is not kept",
        "kernels/install/download.py",
        *("if start + received == 0 and not", "if False and not"),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "no more bytes are taken than the file has",
        "kernels/install/download.py",
        *("if start + received > wheel.size:", "if False:"),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "a broken download goes on where it broke",
        "kernels/install/download.py",
        *('headers["Range"] = f"bytes={have}-"', "pass"),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "the place in the file is the server's word",
        "kernels/install/download.py",
        *("if not given or int(given[1]) != have:", "if False:"),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "a resumed download with a wrong hash begins anew",
        "kernels/install/download.py",
        *("            if not resumed:", "            if True:"),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "a stuck transfer is given up",
        "kernels/install/download.py",
        *("if time.monotonic() - began > timeout + received / SLOWEST:", "if False:"),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "an overloaded server is asked again",
        "kernels/install/download.py",
        *("if status in _RETRIED:", "if False:"),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "redirects lead to web servers only",
        "kernels/install/download.py",
        *('not in ("http", "https"):', 'not in ("http", "https", "ftp"):'),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "passwords are not shown",
        "kernels/install/address.py",
        *('return f"{address.scheme}://{host_of(url)}{address.path}"', "return url"),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "half a download leaves a full disk",
        "kernels/install/download.py",
        *("            _discard(part)  # what cannot grow only takes the room that is missing\n", ""),
        (DISK,),
    ),
    Mutant(
        "installer",
        "a build is made beside its place",
        "kernels/install/store.py",
        *('draft = family / f".{wheel.build}.{token()}.tmp"', "draft = target"),
        (INSTALL, TOGETHER, DISK),
    ),
    Mutant(
        "installer",
        "a broken-off build is not taken for a whole one",
        "kernels/install/store.py",
        *("if not target.is_dir() or problem_of(target, wheel.archs):", "if not target.is_dir():"),
        (
            INSTALL,
            TOGETHER,
        ),
    ),
    Mutant(
        "installer",
        "the manifest is checked before the switch",
        "kernels/install/store.py",
        *(
            "            if problem:\n                raise Trouble(",
            "            if False:\n                raise Trouble(",
        ),
        (ARCHIVE,),
    ),
    Mutant(
        "installer",
        "the pointer changes at one stroke",
        "kernels/install/files.py",
        *(
            "        write_new(draft, data)\n        replace(draft, path)",
            "        path.unlink(missing_ok=True)\n        write_new(path, data)",
        ),
        (INSTALL, TOGETHER, DISK),
    ),
    Mutant(
        "installer",
        "drafts do not stay",
        "kernels/install/store.py",
        *("    finally:\n        remove_tree(draft)", "    finally:\n        pass"),
        (DISK, ARCHIVE),
    ),
    Mutant(
        "installer",
        "one install at a time",
        "kernels/install/lock.py",
        *(
            "            if not self._take():\n                self._waiting()",
            "            if False:\n                self._waiting()",
        ),
        (INSTALL, TOGETHER, WINDOWS),
    ),
    Mutant(
        "installer",
        "the one that waited looks again",
        "kernels/install/command.py",
        *("                return Outcome(THERE, there)  # the other one brought it", "                pass"),
        (
            INSTALL,
            TOGETHER,
        ),
    ),
    Mutant(
        "installer",
        "names stay in their folder",
        "kernels/install/archive.py",
        *("if len(parts) > _DEEPEST or not all(map(_is_plain, parts)):", "if False:"),
        (ARCHIVE,),
    ),
    Mutant(
        "installer",
        "the archive's own name counts",
        "kernels/install/archive.py",
        *("name = member.orig_filename", "name = member.filename"),
        (ARCHIVE,),
    ),
    Mutant(
        "installer",
        "no name is taken twice",
        "kernels/install/archive.py",
        *("if name.lower() in seen:", "if False:"),
        (ARCHIVE,),
    ),
    Mutant(
        "installer",
        "no links",
        "kernels/install/archive.py",
        *("if kind not in (0,", "if False and kind not in (0,"),
        (ARCHIVE,),
    ),
    Mutant(
        "installer",
        "sizes are bounded",
        "kernels/install/archive.py",
        *("if sum(member.file_size for member in members) > LARGEST:", "if False:"),
        (ARCHIVE,),
    ),
    Mutant(
        "installer",
        "a scanner that holds the pointer is waited for",
        "kernels/install/files.py",
        *('for wait in _WAITS if sys.platform == "win32" else ():', "for wait in ():"),
        (WINDOWS,),
    ),
    Mutant(
        "installer",
        "nothing of a package runs",
        "kernels/install/store.py",
        *(
            "        spec = importlib.util.find_spec(package_name(family))",
            "        __import__(package_name(family))\n        spec = importlib.util.find_spec(package_name(family))",
        ),
        (
            INSTALL,
            TOGETHER,
        ),
    ),
    Mutant(
        "installer",
        "it always ends with status 0",
        "install.py",
        *("    except Exception as error:", "    except MemoryError as error:"),
        (
            INSTALL,
            TOGETHER,
        ),
    ),
)
