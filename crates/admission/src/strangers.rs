//! Unknown keys that look like gpustow's, or like the keys of a sharer whose requests a namespace has translated. Each
//! is refused with the nearest known one, or its author is warned. None passes in silence.

use gpustow_api::{BadRequest, names};
use serde_json::Value;

use crate::adopt::{CHOICES, Sharer};
use crate::containers::{all, bad, field};
use crate::keys;

/// The resources of network cards, as NVIDIA's operators name them.
const NICS: [&str; 2] = ["nvidia.com/hostdev", "nvidia.com/mlnxnics"];
/// The prefixes of sharers' keys.
const PREFIXES: [&str; 5] = [
    "aliyun.com/",
    "ALIYUN_COM_GPU_",
    "hami.io/",
    "nvidia.com/",
    "volcano.sh/",
];

/// Does the key begin like the keys of another sharer?
pub(crate) fn is_foreign(key: &str) -> bool {
    PREFIXES.iter().any(|prefix| key.starts_with(prefix))
}

/// The resources of all containers, with where they are.
pub(crate) fn resources(pod: &Value) -> impl Iterator<Item = (String, &str)> {
    all(pod).flat_map(|(path, it)| {
        let lists = ["limits", "requests"].into_iter();
        lists.flat_map(move |list| {
            let at = format!("{}.resources.{list}", field(&path));
            let all = it["resources"][list].as_object().into_iter().flatten();
            let asked = all.filter(|(_, amount)| **amount != "0" && **amount != 0);
            asked.map(move |(key, _)| (format!("{at}[{key}]"), key.as_str()))
        })
    })
}

/// Resources and labels of our group that are none.
pub(crate) fn of_ours(
    pod: &Value,
    resource: &str,
    warnings: &mut Vec<String>,
) -> Result<(), BadRequest> {
    let strange = |key: &str| keys::is_ours(key) && key != resource;
    if let Some((at, key)) = resources(pod).find(|(_, key)| strange(key)) {
        let problem = match keys::annotation_of(key) {
            Some(known) => {
                format!("no node has such a resource: write {known} into metadata.annotations")
            }
            None => format!("no node has such a resource: write {resource}"),
        };
        return Err(bad(at, problem));
    }
    let labels = pod["metadata"]["labels"].as_object();
    let known = [names::MANAGED_LABEL, names::PLACEHOLDER];
    let keys = labels.into_iter().flat_map(|it| it.keys());
    let strange = keys.filter(|key| keys::is_ours(key) && !known.contains(&key.as_str()));
    warnings.extend(strange.map(|key| {
        let fix = match keys::annotation_of(key) {
            Some(known) => format!("write {known} into metadata.annotations"),
            None => "remove it".to_owned(),
        };
        format!("metadata.labels[{key}]: gpustow reads no such label of a pod: {fix}")
    }));
    Ok(())
}

/// Judges the sharer's keys that are left once the pod is translated.
pub(crate) fn of_sharer(
    pod: &Value,
    sharer: Sharer,
    resource: &str,
    warnings: &mut Vec<String>,
) -> Result<(), BadRequest> {
    let word: &str = sharer.into();
    for (at, key) in resources(pod) {
        if is_left(key, sharer) {
            let near = keys::nearest(key, &sharer.replaced());
            let instead =
                near.map_or_else(|| resource.to_owned(), |it| format!("{it} or {resource}"));
            return Err(bad(
                at,
                format!(
                    "gpustow translates no such request in a namespace with the label {}: {word}: write {instead}, or use a \
                     namespace with another label",
                    names::ADOPT_LABEL
                ),
            ));
        }
        if is_of(key, sharer) && !names::is_nvidia_gpu(key) && !NICS.contains(&key) {
            warnings.push(format!(
                "{at}: gpustow does not know this resource and leaves it as it is"
            ));
        }
    }
    let labels = pod["metadata"]["labels"].as_object();
    if sharer == Sharer::Gpushare
        && labels.is_some_and(|it| it.contains_key("aliyun.com/gpu-count"))
    {
        return Err(bad(
            "metadata.labels[aliyun.com/gpu-count]",
            format!(
                "gpustow does not read the label: write {resource} over all GPUs and the annotation {}",
                names::GPU_COUNT
            ),
        ));
    }
    for list in ["annotations", "labels"] {
        let keys = pod["metadata"][list].as_object();
        let keys = keys.into_iter().flat_map(|it| it.keys());
        let read = |key: &str| CHOICES.iter().any(|choice| choice.0 == key);
        let left = keys.filter(|key| is_of(key, sharer) && says_gpu(key) && !read(key));
        warnings.extend(left.map(|key| {
            format!("metadata.{list}[{key}]: gpustow does not follow it: see docs/migrate.md")
        }));
    }
    Ok(())
}

/// Must a resource not be left, because another sharer answers it?
fn is_left(key: &str, sharer: Sharer) -> bool {
    let rest = |prefix: &str| key.strip_prefix(prefix);
    let of_nvidia = rest("nvidia.com/").is_some_and(|it| {
        let is_hamis = it.starts_with("gpumem") || it.starts_with("gpucore") || it == "vgpu";
        is_hamis || it == "gpu" && sharer == Sharer::Hami
    });
    of_nvidia
        || rest("volcano.sh/").is_some_and(|it| it.starts_with("vgpu") || it.starts_with("gpu"))
        || rest("aliyun.com/").is_some_and(|it| it.starts_with("gpu"))
}

/// Does the key belong to this sharer?
fn is_of(key: &str, sharer: Sharer) -> bool {
    let prefixes: &[&str] = match sharer {
        Sharer::Gpushare => &["aliyun.com/", "ALIYUN_COM_GPU_"],
        Sharer::Hami => &["nvidia.com/", "hami.io/"],
        Sharer::Volcano => &["volcano.sh/", "nvidia.com/"],
        Sharer::Whole | Sharer::TimeSlicing | Sharer::Mig | Sharer::MigInstance => &["nvidia.com/"],
    };
    prefixes.iter().any(|prefix| key.starts_with(prefix))
}

/// Is it about GPUs? Volcano's jobs have many labels of its group that are not.
fn says_gpu(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    key.starts_with("hami.io/") || key.contains("gpu")
}
