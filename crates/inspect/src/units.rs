//! Amounts as people write them.

use gpustow_pack::Mib;

/// An amount of memory as people write it: `512Mi`, `24Gi`, `7.5Gi`.
#[allow(clippy::cast_precision_loss, reason = "one digit is shown")]
#[must_use]
pub fn memory(Mib(mib): Mib) -> String {
    match mib {
        0 => "0".to_owned(),
        1..1024 => format!("{mib}Mi"),
        _ if mib.is_multiple_of(1024) => format!("{}Gi", mib / 1024),
        _ => format!("{:.1}Gi", mib as f64 / 1024.0),
    }
}

/// An age as kubectl writes it.
#[must_use]
pub fn age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7_200 => format!("{}m", seconds / 60),
        7_200..172_800 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}
