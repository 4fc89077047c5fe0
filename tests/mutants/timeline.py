"""What the browser is told of a run, and what it makes of that."""

from __future__ import annotations

from mutant import Mutant

LIVE = "tests/nodes/test_live.py"
PAGE = "tests/web/test_page.py"
LANGUAGES = "tests/web/test_languages.py"

MUTANTS = (
    Mutant(
        "timeline",
        "messages are throttled",
        "nodes/live.py",
        *("if self.node_id is None or now - self._last < INTERVAL:", "if self.node_id is None:"),
        (LIVE,),
    ),
    Mutant(
        "timeline",
        "the last message is always sent",
        "nodes/live.py",
        *(
            "        if self.node_id is None or not stats.steps:\n            return\n        step = max",
            "        if self.node_id is None or not stats.steps or time.monotonic() - self._last < INTERVAL:\n"
            "            return\n        step = max",
        ),
        (LIVE,),
    ),
    Mutant(
        "timeline",
        "an interrupted run is called stopped",
        "nodes/live.py",
        *('state = "done" if step + 1 >= stats.step_count else "stopped"', 'state = "done"'),
        (LIVE,),
    ),
    Mutant(
        "timeline",
        "the step that begins has not run",
        "nodes/live.py",
        *('if state != "running" or i != step or i in stats.done}', "}"),
        (LIVE,),
    ),
    Mutant(
        "timeline",
        "what ran is told, not what was planned",
        "nodes/live.py",
        *("_LETTERS[stats.ran(i)] if i in seen", "_LETTERS[stats.steps[i]] if i in seen"),
        (LIVE,),
    ),
    Mutant(
        "timeline",
        "the samplers of a prompt are counted",
        "nodes/live.py",
        *("self.run = self.run + 1 if prompt == self._prompt else 1", "self.run = 1"),
        (LIVE,),
    ),
    Mutant(
        "timeline",
        "a new prompt counts anew",
        "nodes/live.py",
        *("self.run = self.run + 1 if prompt == self._prompt else 1", "self.run += 1"),
        (LIVE,),
    ),
    Mutant(
        "timeline",
        "a very long schedule has no plan in the messages",
        "nodes/live.py",
        *("short = schedule.steps <= LONGEST", "short = True"),
        (LIVE,),
    ),
    Mutant(
        "timeline",
        "a server in trouble does not end the run",
        "nodes/host.py",
        *("    except Exception as error:  # as in show_text\n", "    except MemoryError as error:\n"),
        (LIVE,),
    ),
    Mutant(
        "timeline",
        "only the browser that queued is told",
        "nodes/host.py",
        *("server.send_sync(event, data, client)", "server.send_sync(event, data)"),
        (LIVE,),
    ),
    Mutant(
        "timeline",
        "foreign nodes get no timeline",
        "web/vc_attention.js",
        *(
            "if (node.comfyClass === OURS && node.addDOMWidget) addTimeline(node);",
            "if (node.addDOMWidget) addTimeline(node);",
        ),
        (PAGE,),
    ),
    Mutant(
        "timeline",
        "a locale is a language and no path",
        "web/vc_attention/help.js",
        *('if (tag === "en" || !/^[A-Za-z]{2,3}(-[A-Za-z]+)?$/.test(tag)) continue;', 'if (tag === "en") continue;'),
        (LANGUAGES,),
    ),
    Mutant(
        "timeline",
        "a text that a language lacks is in English",
        "web/vc_attention/texts.js",
        *("lookUp(words, key) ?? lookUp(ENGLISH, key)", "lookUp(words, key)"),
        (LANGUAGES,),
    ),
)
