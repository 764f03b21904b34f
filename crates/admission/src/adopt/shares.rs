//! Requests of NVIDIA's device plugin for parts of GPUs: shares by time-slicing, and MIG instances.

use gpustow_api::BadRequest;
use serde_json::Value;

use super::{LEAST_MIB, Terms, Wish};
use crate::containers::{bad, field, limit};

/// The name of a GPU share in NVIDIA's device plugin, if its configuration has `renameByDefault`.
pub(super) const SHARED_GPU: &str = "nvidia.com/gpu.shared";
/// The prefix of MIG instances in NVIDIA's device plugin, before the name of the profile.
pub(super) const MIG: &str = "nvidia.com/mig-";
/// MIG profiles and the MiB of an instance, as `nvidia-smi mig -lgip` lists them on A30, A100, H100 and H200: the most where
/// GPUs differ.
pub(super) const PROFILES: [(&str, u64); 15] = [
    ("nvidia.com/mig-1g.5gb", 4_864),
    ("nvidia.com/mig-1g.6gb", 5_952),
    ("nvidia.com/mig-1g.10gb", 9_984),
    ("nvidia.com/mig-1g.18gb", 16_384),
    ("nvidia.com/mig-1g.20gb", 20_096),
    ("nvidia.com/mig-2g.10gb", 9_856),
    ("nvidia.com/mig-2g.12gb", 11_968),
    ("nvidia.com/mig-2g.20gb", 20_096),
    ("nvidia.com/mig-3g.20gb", 19_968),
    ("nvidia.com/mig-3g.40gb", 40_448),
    ("nvidia.com/mig-4g.20gb", 19_968),
    ("nvidia.com/mig-4g.24gb", 24_064),
    ("nvidia.com/mig-4g.40gb", 40_448),
    ("nvidia.com/mig-7g.40gb", 40_192),
    ("nvidia.com/mig-7g.80gb", 81_152),
];

/// The MiB of an instance of this profile.
pub(super) fn mib_of(key: &str) -> Option<u64> {
    let found = PROFILES.iter().find(|(profile, _)| *profile == key)?;
    Some(found.1)
}

/// The MIG instance among the limits of a container; empty if there is none.
pub(super) fn profile(path: &str, it: &Value, resource: &str) -> Result<&'static str, BadRequest> {
    let limits = it["resources"]["limits"].as_object();
    let keys = limits.into_iter().flatten().map(|(key, _)| key);
    let mut asked = keys.filter(|key| key.starts_with(MIG) && limit(it, key).is_some());
    let Some(first) = asked.next() else {
        return Ok("");
    };
    let known = PROFILES.iter().find(|(key, _)| key == first);
    let problem = match (known, asked.next()) {
        (Some((key, _)), None) => return Ok(key),
        (Some(_), Some(other)) => {
            format!("a container asks either for this or for {other}: remove one")
        }
        (None, _) => {
            let all = PROFILES.map(|(key, _)| key.trim_start_matches(MIG));
            let all = all.join(", ");
            format!(
                "gpustow knows the MiB of these MIG profiles: {all}. Write one of them, or {resource}"
            )
        }
    };
    Err(bad(
        format!("{}.resources.limits[{first}]", field(path)),
        problem,
    ))
}

/// A percentage of one GPU, or of as few as have so many shares.
pub(super) fn of_shares(shares: u64, terms: Terms) -> Wish {
    let shares = shares.max(1);
    let gpus = shares.div_ceil(terms.replicas);
    let all = terms.replicas.saturating_mul(gpus);
    let percentage = (shares.saturating_mul(100) / all).max(1);
    let each = terms.mib_per_gpu.unwrap_or(LEAST_MIB) * percentage / 100;
    Wish {
        gpus,
        mib: gpus.saturating_mul(each.max(1)),
        percentage,
        whole: false,
        units: 0,
    }
}
