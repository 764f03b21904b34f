//! Figures of several rounds, for the benchmarks.

/// The value below which a share of `q` of these ascending values lies.
#[must_use]
pub fn quantile(sorted: &[f64], q: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted
        .get((last as f64 * q).round() as usize)
        .copied()
        .unwrap_or(f64::NAN)
}

/// The middle one of these values.
#[must_use]
pub fn median(values: impl Iterator<Item = f64>) -> f64 {
    quantile(&sorted(values), 0.5)
}

/// These values, ascending.
#[must_use]
pub fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// These quantiles of ascending values, with so many digits: `p50 / p99` for 0.5 and 0.99.
#[must_use]
pub fn quantiles<const N: usize>(sorted: &[f64], shares: [f64; N], digits: usize) -> String {
    let shares = shares.map(|q| format!("{:.digits$}", quantile(sorted, q)));
    shares.join(" / ")
}

/// Median, least and most, with so many digits.
#[must_use]
pub fn spread(values: impl Iterator<Item = f64>, digits: usize) -> String {
    let values = sorted(values);
    let [least, middle, most] = [0.0, 0.5, 1.0].map(|q| quantile(&values, q));
    format!("{middle:.digits$} ({least:.digits$}..{most:.digits$})")
}
