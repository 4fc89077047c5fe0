// Every word of the timeline, in the language that ComfyUI's frontend is set to. The words of all languages lie in
// locales/*/main.json; ComfyUI serves them, with those of other packs, at /i18n. What a language lacks is in English.

import { ENGLISH } from "./english.js";
import { PHASES } from "./schedule.js";

/** Our part of a pack's translations. */
const OURS = "vcAttention";

let served = {};
let language = "en";
let words = {};
let plural = new Intl.PluralRules("en");

/** Take what /i18n answers: { language: { vcAttention: {...}, ... } }. */
export function setTranslations(answer) {
    served = answer && typeof answer === "object" ? answer : {};
    choose(language);
}

/** Show the language of a locale, such as "de" or "zh-TW". Of "de-AT", "de" is taken; of an unknown one, English. */
export function setLanguage(locale) {
    if (locale && locale !== language) choose(locale);
}

/** The locale that was set last. */
export const languageOf = () => language;

function choose(locale) {
    language = locale;
    words = served[locale]?.[OURS] ?? served[locale.split("-")[0]]?.[OURS] ?? {};
    try {
        plural = new Intl.PluralRules(locale);
    } catch {
        plural = new Intl.PluralRules("en");
    }
}

function lookUp(tree, key) {
    const found = key.split(".").reduce((branch, name) => branch?.[name], tree);
    return typeof found === "string" ? found : undefined;
}

/** The text of a key such as "states.running", with {name} replaced by values.name; undefined for an unknown key. */
export function text(key, values = {}) {
    const found = lookUp(words, key) ?? lookUp(ENGLISH, key);
    return found?.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}

/** A text that depends on a number: "one" or "other" below `key`. */
const counted = (key, count, values = {}) =>
    text(`${key}.${plural.select(count) === "one" ? "one" : "other"}`, { count, ...values });

/** "group", "reuse", "plain" or "16 bit". */
export const phaseName = (phase) => text(`phases.${phase}`);

/** "1 step", "20 steps". */
export const steps = (count) => counted("steps", count);

/** What step `index` (from 0) does. state: "now" while it runs, else empty. */
export const stepText = (index, phase, state = "") =>
    text(state === "now" ? "stepRunning" : "step", {
        number: index + 1,
        phase: phaseName(phase),
        does: text(`does.${phase}`),
    });

/** How many steps of each phase: [[phase, count], ...], phases that do not occur left out. */
export function tally(phases) {
    return PHASES.map((phase) => [phase, phases.filter((entry) => entry === phase).length]).filter(([, n]) => n);
}

/** One sentence for a whole row, for those who do not see it. */
export function rowText(title, phases) {
    const parts = tally(phases).map(([phase, count]) => text("amount", { count, phase: phaseName(phase) }));
    const list = parts.length ? parts.reduce((before, next) => text("list", { before, next })) : "";
    return text("row", { title, steps: steps(phases.length), phases: list });
}

/** Why calls were declined, in a few words; `words` of the server for a code that this file does not know. */
export const reasonWords = (code, words) => text(`reasons.${code}`) ?? words;

/** What stands before and behind the words in "2 calls declined: words". */
export function declinedAround(count) {
    const [before, behind = ""] = counted("declined", count, { words: "\0" }).split("\0");
    return [before, behind];
}
