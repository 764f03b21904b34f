//! Versions of gpustow as they are written in a cluster.

/// This build's.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Is it a later version than this build's?
#[must_use]
pub fn is_later(version: &str) -> bool {
    ordinal(version) > ordinal(VERSION)
}

/// Major, minor and patch as one number; none if `version` is not a version.
fn ordinal(version: &str) -> Option<u64> {
    let release = version.split(['-', '+']).next().unwrap_or_default();
    let mut parts = release.split('.');
    let first = parts.next();
    let ordinal = [
        first,
        parts.next().or(Some("0")),
        parts.next().or(Some("0")),
    ]
    .into_iter()
    .try_fold(0, |all, part| {
        let part = part.filter(|it| it.len() <= 5 && it.bytes().all(|it| it.is_ascii_digit()))?;
        Some(all * 100_000 + part.parse::<u64>().ok()?)
    });
    ordinal.filter(|_| parts.next().is_none())
}
