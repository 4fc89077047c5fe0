// Colours of the timeline. Text and panel are those of the frontend's theme; where a theme's own pair is hard to read,
// and for the four phases, colours of this file are taken that keep the contrast which WCAG 2.2 AA asks for: 4.5 for
// text, 3 for what is drawn.

const TEXT = 4.5;
const SHAPE = 3;

/** Okabe and Ito's colours, which stay apart for every kind of colour vision, in a light and a dark version. */
const PHASE = {
    dark: { group: "#56b4e9", reuse: "#2fb592", plain: "#a9a9a9", dense: "#e69f00", link: "#7cc4f2" },
    light: { group: "#00548a", reuse: "#00634a", plain: "#565656", dense: "#8a4300", link: "#00457a" },
};

/** [r, g, b], each 0 to 255, of a CSS colour as getComputedStyle gives it, or null where it is transparent. */
export function parse(colour) {
    const numbers = (colour.match(/[\d.]+/g) ?? []).map(Number);
    if (!colour.startsWith("rgb") || numbers.length < 3 || numbers[3] === 0) return null;
    return numbers.slice(0, 3);
}

/** WCAG's relative luminance of [r, g, b]. */
export function luminance(rgb) {
    const [r, g, b] = rgb.map((value) => {
        const c = value / 255;
        return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** WCAG's contrast ratio of two [r, g, b], from 1 to 21. */
export function contrast(a, b) {
    const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
}

/** What the browser makes of a CSS colour or variable, as [r, g, b]. */
function resolve(probe, value, otherwise) {
    probe.style.color = otherwise;
    probe.style.color = value;
    return parse(getComputedStyle(probe).color) ?? parse(otherwise) ?? [0, 0, 0];
}

const css = (rgb) => `rgb(${rgb.map(Math.round).join(", ")})`;

/** Set the colours of the timeline `element`, which is in the page, to the theme of this moment. */
export function applyTheme(element) {
    const probe = document.createElement("span");
    probe.hidden = true;
    element.append(probe);
    const panel = resolve(probe, "var(--comfy-input-bg, rgb(34, 34, 34))", "rgb(34, 34, 34)");
    const light = contrast(panel, [0, 0, 0]) > contrast(panel, [255, 255, 255]);
    const strong = light ? [0, 0, 0] : [255, 255, 255];
    const readable = (value, least) => {
        let rgb = resolve(probe, value, css(strong));
        // a theme of unusual colours: towards black or white until it can be read
        for (let i = 0; i < 20 && contrast(rgb, panel) < least; i++) rgb = rgb.map((c, k) => c + (strong[k] - c) * 0.2);
        return css(rgb);
    };
    const phases = PHASE[light ? "light" : "dark"];
    const colours = {
        "--vca-panel": css(panel),
        "--vca-text": readable("var(--input-text)", TEXT),
        "--vca-quiet": readable("var(--descrip-text)", TEXT),
        "--vca-link": readable(phases.link, TEXT),
    };
    for (const name of ["group", "reuse", "plain", "dense"]) colours[`--vca-${name}`] = readable(phases[name], SHAPE);
    probe.remove();
    for (const [name, value] of Object.entries(colours)) element.style.setProperty(name, value);
    element.dataset.theme = light ? "light" : "dark";
}
