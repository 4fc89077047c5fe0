// Which step of a sampler run does what. The same rule as `Schedule` in nodes/schedule.py, in the same double
// precision: tests/web compares the two on a grid of values. Nothing here knows of ComfyUI or the browser.

export const GROUP = "group"; // the groups of the value tokens are computed in this step
export const REUSE = "reuse"; // the groups of an earlier step serve
export const PLAIN = "plain"; // low-bit attention without groups
export const DENSE = "dense"; // 16 bit

export const PHASES = [GROUP, REUSE, PLAIN, DENSE];

const RELATIVE = 1e-5;

/** Whether a schedule runs from the model's largest sigma down to zero. */
function isFull(sigmas, sigmaMax) {
    const steps = sigmas.length - 1;
    if (steps < 1 || sigmas[steps] > sigmas[0]) return false;
    return Math.abs(sigmas[steps]) < 1e-6 && (sigmaMax === null || sigmas[0] >= sigmaMax * 0.999);
}

/** The last step whose sigma is not below `sigma` (not above it, where the schedule rises). */
function stepOf(sigmas, rising, sigma) {
    const entries = sigmas.slice(0, -1);
    const passed = rising
        ? entries.filter((s) => s <= sigma * (1 + RELATIVE))
        : entries.filter((s) => s >= sigma * (1 - RELATIVE));
    return Math.max(passed.length - 1, 0);
}

/**
 * The phase of every step of a sampler run.
 *
 * sigmas: the sampler's own slice of noise levels, steps + 1 numbers. options: grouping, group_fraction, reuse_steps,
 * start_percent and end_percent, as the widgets have them. percentToSigma: of the model's sampling, or null.
 * sigmaMax: its largest sigma, or null. Returns an array of `steps` phases.
 */
export function phasesOf(sigmas, options, percentToSigma = null, sigmaMax = null) {
    const steps = Math.max(sigmas.length - 1, 0);
    const rising = steps > 0 && sigmas[steps] > sigmas[0];
    const highest =
        percentToSigma === null || options.start_percent <= 0 ? Infinity : percentToSigma(options.start_percent);
    const lowest =
        percentToSigma === null || options.end_percent >= 1 ? -Infinity : percentToSigma(options.end_percent);
    let cut = -Infinity;
    let window = 0;
    if (options.grouping === "off" || (options.grouping === "first steps" && options.group_fraction <= 0)) {
        window = 0;
    } else if (options.grouping === "all steps") {
        window = steps;
    } else if (isFull(sigmas, sigmaMax) || percentToSigma === null) {
        window = Math.min(steps, Math.ceil(options.group_fraction * steps - 1e-9));
    } else {
        cut = percentToSigma(options.group_fraction) * (1 + RELATIVE);
        window = sigmas.slice(0, -1).filter((s) => s > cut).length;
    }
    return sigmas.slice(0, -1).map((sigma) => {
        const step = stepOf(sigmas, rising, sigma);
        if (sigma > highest * (1 + RELATIVE) || sigma < lowest * (1 - RELATIVE)) return DENSE;
        const inside = sigma > cut && (step < window || (rising && window > 0));
        if (!inside) return PLAIN;
        return step % options.reuse_steps ? REUSE : GROUP;
    });
}

/**
 * What the node's widgets ask of a sampler whose schedule is known only as shares of the denoising.
 *
 * noise: steps + 1 numbers, 1 - share of the denoising done, from 1 (all noise) to 0. The scheduler "simple" of a
 * flow model spaces its steps so, whatever its shift; other schedulers move where start_percent, end_percent and, in
 * the second of two samplers, group_fraction fall. The run itself then shows what really happened.
 */
export function expected(noise, options) {
    if (options.precision === "off") return noise.slice(0, -1).map(() => DENSE);
    return phasesOf(noise, options, (percent) => 1 - Math.min(Math.max(percent, 0), 1), 1);
}

/**
 * The noise levels of a sampler with `steps` steps, as shares.
 *
 * denoise < 1: the last `steps` of a longer schedule. start, end: as KSamplerAdvanced has them. full: the run ends
 * without noise even where it stops early. Returns an array of numbers, empty where nothing would run.
 */
export function noiseLevels(steps, { denoise = 1, start = 0, end = Infinity, full = false } = {}) {
    if (!(steps >= 1) || denoise <= 0) return [];
    const total = denoise > 0.9999 ? steps : Math.trunc(steps / denoise);
    let noise = Array.from({ length: total + 1 }, (_, i) => 1 - i / total).slice(-(steps + 1));
    if (end < noise.length - 1) {
        noise = noise.slice(0, end + 1);
        if (full) noise[noise.length - 1] = 0;
    }
    if (start > 0) noise = start < noise.length - 1 ? noise.slice(start) : [];
    return noise;
}
