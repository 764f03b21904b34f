//! Requests of other GPU sharers, translated as the policies gpustow-adopt-* do when pods are created
//! (`policies/adopt.yaml`), for those who want to know before.

use std::collections::BTreeMap;

use gpustow_api::{names, quantity};
use k8s_openapi::api::core::v1::{Container, EnvVar, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use strum::{EnumString, IntoStaticStr, VariantNames};
use thiserror::Error;

/// MiB of a GPU of which nothing is known.
const LEAST_MIB: u64 = 1024;
const HAMI_MEMORY: &str = "nvidia.com/gpumem";
const HAMI_PERCENTAGE: &str = "nvidia.com/gpumem-percentage";
const HAMI_CORES: &str = "nvidia.com/gpucores";
const HAMI_PLACED: &str = "hami.io/vgpu-devices-allocated";
const VOLCANO_GPUS: &str = "volcano.sh/vgpu-number";
const VOLCANO_MEMORY: &str = "volcano.sh/vgpu-memory";
const VOLCANO_PERCENTAGE: &str = "volcano.sh/vgpu-memory-percentage";
const VOLCANO_CORES: &str = "volcano.sh/vgpu-cores";
/// HAMi's annotations that choose GPUs, gpustow's, and what stands before and after each entry.
const CHOICES: [(&str, &str, &str); 4] = [
    ("nvidia.com/use-gputype", names::GPU_MODELS, "*"),
    ("nvidia.com/nouse-gputype", names::NOT_GPU_MODELS, "*"),
    ("nvidia.com/use-gpuuuid", names::GPU_UUIDS, ""),
    ("nvidia.com/nouse-gpuuuid", names::NOT_GPU_UUIDS, ""),
];

/// A GPU sharer whose requests are translated, by the value of [`names::ADOPT_LABEL`].
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, EnumString, IntoStaticStr, VariantNames,
)]
#[strum(serialize_all = "lowercase")]
pub enum Sharer {
    /// Aliyun's gpushare.
    Gpushare,
    /// HAMi.
    Hami,
    /// Volcano's vGPU.
    Volcano,
    /// Whole GPUs of NVIDIA's device plugin.
    Whole,
}

impl Sharer {
    /// The sharer that answers what a pod requests. HAMi's pods that request whole GPUs look like those of NVIDIA's
    /// device plugin until HAMi has placed them.
    #[must_use]
    pub fn of(pod: &Pod) -> Option<Self> {
        let requests = |key: &str| all(pod).any(|it| asked(it, key).is_some());
        let annotations = pod.metadata.annotations.as_ref();
        let is_hamis = annotations.is_some_and(|it| it.contains_key(HAMI_PLACED));
        if requests(names::GPUSHARE_MEM) {
            Some(Self::Gpushare)
        } else if requests(VOLCANO_GPUS) {
            Some(Self::Volcano)
        } else if requests(HAMI_MEMORY) || requests(HAMI_PERCENTAGE) || requests(HAMI_CORES) {
            Some(Self::Hami)
        } else {
            let whole = if is_hamis { Self::Hami } else { Self::Whole };
            requests(names::NVIDIA_GPU).then_some(whole)
        }
    }
}

/// How a namespace's requests are translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Whose they are.
    pub sharer: Sharer,
    /// MiB of one of gpushare's units.
    pub mib_per_unit: u64,
    /// MiB that each GPU has at least, if that is known.
    pub mib_per_gpu: Option<u64>,
}

impl Terms {
    /// What a namespace's labels say; `None` if they name no sharer.
    ///
    /// # Errors
    /// The value that is no sharer.
    pub fn of(labels: &BTreeMap<String, String>) -> Result<Option<Self>, &str> {
        let Some(word) = labels.get(names::ADOPT_LABEL) else {
            return Ok(None);
        };
        let of = |key: &str| labels.get(key).map(String::as_str);
        let mib_per_gpu = of(names::ADOPT_MIB_LABEL).and_then(|it| {
            let is_number = !it.starts_with(['0', '+']) && it.len() <= 7;
            it.parse().ok().filter(|_| is_number)
        });
        Ok(Some(Self {
            sharer: word.parse().map_err(|_| word.as_str())?,
            mib_per_unit: match of(names::ADOPT_UNIT_LABEL) {
                Some("MiB") => 1,
                _ => 1024,
            },
            mib_per_gpu,
        }))
    }
}

/// Why a pod would be refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct Refused(String);

/// What one container requests of the other sharer.
#[derive(Clone, Copy, Debug)]
struct Wish {
    gpus: u64,
    /// MiB of all of them.
    mib: u64,
    /// Hundredths of each of them, if that was asked for.
    percentage: u64,
    whole: bool,
    /// The number that was written, in gpushare's unit.
    units: u64,
}

/// The pod as it would be created, where GPU memory is called `resource`; `None` if it requests nothing that is
/// translated.
///
/// # Errors
/// [`Refused`] says why the pod would not be created.
pub fn translate(pod: &Pod, terms: Terms, resource: &str) -> Result<Option<Pod>, Refused> {
    let wishes = all(pod).map(|it| wish(it, terms));
    let wishes: Vec<Option<Wish>> = wishes.collect::<Result<_, _>>()?;
    let mut new = pod.clone();
    if wishes.iter().any(Option::is_some) {
        judge(pod, terms.sharer, &wishes)?;
        change(&mut new, terms.sharer, &wishes, resource);
    }
    let left = all(&new).find_map(|it| foreign(it, terms.sharer));
    if let Some(key) = left {
        let sharer: &str = terms.sharer.into();
        return Err(Refused(format!(
            "resources.limits[{key}]: gpustow translates no such request in a namespace with the label {}: {sharer}",
            names::ADOPT_LABEL
        )));
    }
    Ok(wishes.iter().any(Option::is_some).then_some(new))
}

/// Init containers first, as [`change`] goes through them.
fn all(pod: &Pod) -> impl Iterator<Item = &Container> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| {
        spec.init_containers
            .iter()
            .flatten()
            .chain(&spec.containers)
    })
}

fn limits(container: &Container) -> Option<&BTreeMap<String, Quantity>> {
    container.resources.as_ref()?.limits.as_ref()
}

/// A limit that is not zero.
fn asked<'a>(container: &'a Container, key: &str) -> Option<&'a Quantity> {
    limits(container)?.get(key).filter(|it| it.0 != "0")
}

fn wish(container: &Container, terms: Terms) -> Result<Option<Wish>, Refused> {
    let number = |key: &str| {
        let Some(amount) = asked(container, key) else {
            return Ok(0);
        };
        quantity::whole(amount).ok_or_else(|| {
            Refused(format!(
                "resources.limits[{key}]: {:?} is not a whole number",
                amount.0
            ))
        })
    };
    let asks = |key: &str| asked(container, key).is_some();
    let (gpus, memory, percentage) = match terms.sharer {
        Sharer::Gpushare => {
            let units = number(names::GPUSHARE_MEM)?;
            return Ok(asks(names::GPUSHARE_MEM).then(|| Wish {
                gpus: 1,
                mib: units.saturating_mul(terms.mib_per_unit),
                percentage: 0,
                whole: false,
                units,
            }));
        }
        Sharer::Hami => {
            let keys = [names::NVIDIA_GPU, HAMI_MEMORY, HAMI_PERCENTAGE];
            if !keys.into_iter().any(asks) {
                return Ok(None);
            }
            let gpus = number(names::NVIDIA_GPU)?.max(1);
            (gpus, HAMI_MEMORY, asked(container, HAMI_PERCENTAGE))
        }
        Sharer::Volcano if !asks(VOLCANO_GPUS) => return Ok(None),
        Sharer::Volcano => {
            let gpus = number(VOLCANO_GPUS)?;
            (gpus, VOLCANO_MEMORY, asked(container, VOLCANO_PERCENTAGE))
        }
        Sharer::Whole if !asks(names::NVIDIA_GPU) => return Ok(None),
        Sharer::Whole => (number(names::NVIDIA_GPU)?, "", None),
    };
    let whole = terms.mib_per_gpu.unwrap_or(LEAST_MIB);
    let asked_part = percentage.filter(|it| it.0 != "100");
    let (each, percentage) = match (number(memory)?, asked_part) {
        (0, None) => (whole, 0),
        (0, Some(part)) => {
            let part = quantity::whole(part).filter(|it| (1..100).contains(it));
            let part = part.ok_or_else(|| refused(terms.sharer))?;
            ((whole * part / 100).max(1), part)
        }
        (mib, _) => (mib, 0),
    };
    Ok(Some(Wish {
        gpus,
        mib: gpus.saturating_mul(each),
        percentage,
        whole: !asks(memory) && asked_part.is_none(),
        units: 0,
    }))
}

/// Why a request of HAMi or Volcano is refused; the policies add what to write instead.
pub(crate) fn refused(sharer: Sharer) -> Refused {
    let (name, grouped) = match sharer {
        Sharer::Volcano => ("Volcano", "of a pod of a PodGroup, "),
        _ => ("HAMi", ""),
    };
    Refused(format!(
        "gpustow cannot translate a request of {name} for whole GPUs in one container and memory in another, {grouped}or \
         for a percentage that is not 1 to 100"
    ))
}

/// Refuses pods that would be placed wrongly.
fn judge(pod: &Pod, sharer: Sharer, wishes: &[Option<Wish>]) -> Result<(), Refused> {
    let mut whole = wishes.iter().flatten().map(|wish| wish.whole);
    let first = whole.next();
    let is_mixed = whole.any(|it| Some(it) != first);
    let annotations = pod.metadata.annotations.as_ref();
    let grouped = annotations.and_then(|it| it.get("scheduling.k8s.io/group-name"));
    let is_grouped = sharer == Sharer::Volcano && grouped.is_some_and(|it| !it.is_empty());
    match is_mixed || is_grouped {
        true => Err(refused(sharer)),
        false => Ok(()),
    }
}

/// The first request that another sharer answers, if nothing translates it.
fn foreign(container: &Container, sharer: Sharer) -> Option<&str> {
    let is_foreign = |key: &str| {
        key.starts_with("volcano.sh/vgpu-")
            || [
                names::GPUSHARE_MEM,
                HAMI_MEMORY,
                HAMI_PERCENTAGE,
                HAMI_CORES,
            ]
            .contains(&key)
            || key == names::NVIDIA_GPU && sharer == Sharer::Hami
    };
    let mut keys = limits(container).into_iter().flatten();
    let found = keys.find(|(key, amount)| amount.0 != "0" && is_foreign(key));
    found.map(|(key, _)| key.as_str())
}

fn change(pod: &mut Pod, sharer: Sharer, wishes: &[Option<Wish>], resource: &str) {
    let (replaced, cores, scheduler): (&[&str], _, _) = match sharer {
        Sharer::Gpushare => (&[names::GPUSHARE_MEM, "aliyun.com/gpu-count"], "", ""),
        Sharer::Hami => (
            &[
                names::NVIDIA_GPU,
                HAMI_MEMORY,
                HAMI_PERCENTAGE,
                HAMI_CORES,
                "nvidia.com/priority",
            ],
            HAMI_CORES,
            "hami-scheduler",
        ),
        Sharer::Volcano => (
            &[
                VOLCANO_GPUS,
                VOLCANO_MEMORY,
                VOLCANO_PERCENTAGE,
                VOLCANO_CORES,
            ],
            VOLCANO_CORES,
            "volcano",
        ),
        Sharer::Whole => (&[names::NVIDIA_GPU], "", ""),
    };
    let sharer_word: &str = sharer.into();
    let adopted = match all(pod).any(|it| asked(it, cores).is_some()) {
        true => format!("{sharer_word}, without {cores}"),
        false => sharer_word.to_owned(),
    };
    let of_pod = wishes.iter().flatten().map(|wish| wish.units).sum::<u64>();
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.insert(names::ADOPTED.to_owned(), adopted);
    if wishes.iter().flatten().all(|wish| wish.whole) {
        annotations.insert(names::EXCLUSIVE.to_owned(), "true".to_owned());
    }
    if matches!(sharer, Sharer::Hami | Sharer::Volcano) {
        choose(annotations);
    }
    let Some(spec) = &mut pod.spec else {
        return;
    };
    if spec.scheduler_name.as_deref() == Some(scheduler) {
        spec.scheduler_name = Some("default-scheduler".to_owned());
    }
    let init = spec.init_containers.iter_mut().flatten();
    let containers = init.chain(&mut spec.containers);
    for (container, wish) in containers.zip(wishes) {
        let Some(wish) = wish else { continue };
        if wish.gpus > 1 {
            let key = format!("{}{}", names::GPU_COUNT_OF, container.name);
            annotations.insert(key, wish.gpus.to_string());
        }
        if wish.percentage > 0 {
            let key = format!("{}{}", names::GPU_MEM_PERCENTAGE_OF, container.name);
            annotations.insert(key, wish.percentage.to_string());
        }
        let resources = container.resources.get_or_insert_default();
        for list in [&mut resources.limits, &mut resources.requests] {
            let list = list.get_or_insert_default();
            list.retain(|key, _| !replaced.contains(&key.as_str()));
            list.insert(resource.to_owned(), Quantity(wish.mib.to_string()));
        }
        if sharer == Sharer::Gpushare {
            for (name, value) in [
                ("ALIYUN_COM_GPU_MEM_CONTAINER", wish.units),
                ("ALIYUN_COM_GPU_MEM_POD", of_pod),
            ] {
                let env = container.env.get_or_insert_default();
                if !env.iter().any(|it| it.name == name) {
                    env.push(EnvVar {
                        name: name.to_owned(),
                        value: Some(value.to_string()),
                        value_from: None,
                    });
                }
            }
        }
    }
}

/// Says in gpustow's annotations which GPUs HAMi's choose. HAMi's names of models begin with the maker's twice.
fn choose(annotations: &mut BTreeMap<String, String>) {
    for (theirs, ours, around) in CHOICES {
        let Some(value) = annotations.get(theirs) else {
            continue;
        };
        let entries = value.split(',').map(str::trim);
        let entries = entries.filter(|it| !it.is_empty()).map(|it| {
            let name = it.strip_prefix("NVIDIA-").unwrap_or(it);
            format!("{around}{name}{around}")
        });
        let entries = entries.collect::<Vec<_>>().join(",");
        if !entries.is_empty() && !annotations.contains_key(ours) {
            annotations.insert(ours.to_owned(), entries);
        }
    }
}
