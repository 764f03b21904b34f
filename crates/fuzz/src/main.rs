//! The targets under libFuzzer: `GPUSTOW_TARGET` names the target, and the arguments are libFuzzer's.
#![no_main]

use std::sync::LazyLock;

use gpustow_fuzz::{TARGETS, Target};
use libfuzzer_sys::fuzz_target;

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let wanted = std::env::var("GPUSTOW_TARGET").unwrap_or_default();
    let found = TARGETS.iter().find(|(name, _)| *name == wanted);
    let names = TARGETS.map(|(name, _)| name).join(", ");
    found.map_or_else(
        || {
            eprintln!("GPUSTOW_TARGET={wanted}: it is one of {names}");
            std::process::exit(2)
        },
        |(_, target)| *target,
    )
});

fuzz_target!(|data: &[u8]| TARGET(data));
