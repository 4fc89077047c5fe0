// Shows a help page of web/docs outside of the frontend's own panel, so that a decline reason can be linked to. It
// knows the Markdown that those pages are written in: headings, paragraphs, lists, tables, bold, italics, code.

const INLINE = /`([^`]+)`|\*\*(.+?)\*\*|\*(.+?)\*/g;

/** Append the inline Markdown `text` to `parent`. */
function inline(parent, text) {
    let at = 0;
    for (const match of text.matchAll(INLINE)) {
        parent.append(text.slice(at, match.index));
        const tag = match[1] !== undefined ? "code" : match[2] !== undefined ? "strong" : "em";
        const element = document.createElement(tag);
        if (tag === "code") element.textContent = match[1];
        else inline(element, match[2] ?? match[3]);
        parent.append(element);
        at = match.index + match[0].length;
    }
    parent.append(text.slice(at));
}

function block(tag, text) {
    const element = document.createElement(tag);
    inline(element, text);
    return element;
}

const cellsOf = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

/** A table; a row that begins with a code alone has that code as its id. */
function table(lines) {
    const element = document.createElement("table");
    const head = element.createTHead().insertRow();
    for (const cell of cellsOf(lines[0])) {
        const header = block("th", cell);
        header.scope = "col";
        head.append(header);
    }
    const body = element.createTBody();
    for (const line of lines.slice(2)) {
        const row = body.insertRow();
        const cells = cellsOf(line);
        const code = cells[0].match(/^`(\w+)`$/);
        if (code) row.id = code[1];
        row.append(...cells.map((cell) => block("td", cell)));
    }
    return element;
}

function list(lines) {
    const element = document.createElement("ul");
    const items = lines.join("\n").split(/^- /m).filter(Boolean);
    element.append(...items.map((item) => block("li", item.replace(/\s+/g, " ").trim())));
    return element;
}

/** The elements of a help page. */
export function render(markdown) {
    return markdown
        .trim()
        .split(/\n{2,}/)
        .map((part) => {
            const lines = part.split("\n");
            const heading = part.match(/^(#{1,4}) (.*)$/);
            if (heading) return block(`h${heading[1].length}`, heading[2]);
            if (lines[0].startsWith("|")) return table(lines);
            if (lines[0].startsWith("- ")) return list(lines);
            return block("p", lines.join(" "));
        });
}

/** The answer with the page of `node` in the language of `locale`, or else in English, and that language. */
async function page(node, locale) {
    const fetched = (path) => fetch(new URL(`../docs/${path}.md`, import.meta.url));
    for (const tag of new Set([locale, locale.split("-")[0]])) {
        if (tag === "en" || !/^[A-Za-z]{2,3}(-[A-Za-z]+)?$/.test(tag)) continue;
        const answer = await fetched(`${node}/${tag}`);
        if (answer.ok) return [answer, tag];
    }
    const answer = await fetched(node);
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
    return [answer, "en"];
}

// The frontend loads every script of the pack; only the help page itself asks for one.
const node = document.documentElement.dataset.vcAttentionHelp;
if (node) {
    const main = document.querySelector("main");
    const locale = new URLSearchParams(location.search).get("locale") ?? "en";
    try {
        const [answer, found] = await page(node, locale);
        document.documentElement.lang = found;
        main.replaceChildren(...render(await answer.text()));
        const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
        if (target) {
            target.scrollIntoView({ block: "center" });
            location.replace(location.href); // the row exists only now: so that :target finds it
        }
    } catch (error) {
        main.textContent = `The help page could not be loaded (${error.message}). It is web/docs/${node}.md in the pack.`;
    }
}
