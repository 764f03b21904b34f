//! Requests of other GPU sharers, translated when pods are created in a namespace whose label names the sharer.

mod shares;

use std::collections::BTreeMap;

use gpustow_api::{BadRequest, names};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};
use strum::{EnumString, IntoStaticStr, VariantNames};

use crate::Patch;
use crate::containers::{all, bad, field, limit, name, note, notes, whole};
use crate::strangers;
use shares::{MIG, PROFILES, SHARED_GPU, mib_of, of_shares, profile};

/// MiB of a GPU of which nothing is known.
const LEAST_MIB: u64 = 1024;
const HAMI_MEMORY: &str = "nvidia.com/gpumem";
const HAMI_PERCENTAGE: &str = "nvidia.com/gpumem-percentage";
const HAMI_CORES: &str = "nvidia.com/gpucores";
const HAMI_PLACED: &str = "hami.io/vgpu-devices-allocated";
const VOLCANO_GPUS: &str = "volcano.sh/vgpu-number";
const VOLCANO_PERCENTAGE: &str = "volcano.sh/vgpu-memory-percentage";
const VOLCANO_CORES: &str = "volcano.sh/vgpu-cores";
/// HAMi's annotations that choose GPUs, gpustow's, and the text before and after each entry.
pub(crate) const CHOICES: [(&str, &str, &str); 4] = [
    ("nvidia.com/use-gputype", names::GPU_MODELS, "*"),
    ("nvidia.com/nouse-gputype", names::NOT_GPU_MODELS, "*"),
    ("nvidia.com/use-gpuuuid", names::GPU_UUIDS, ""),
    ("nvidia.com/nouse-gpuuuid", names::NOT_GPU_UUIDS, ""),
];

/// A GPU sharer whose requests are translated, by the value of [`names::ADOPT_LABEL`].
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, EnumString, IntoStaticStr, VariantNames,
)]
#[strum(serialize_all = "kebab-case")]
pub enum Sharer {
    /// Aliyun's gpushare.
    Gpushare,
    /// HAMi.
    Hami,
    /// Volcano's vGPU.
    Volcano,
    /// Whole GPUs of NVIDIA's device plugin.
    Whole,
    /// GPUs that NVIDIA's device plugin gives to several pods in turn.
    TimeSlicing,
    /// MIG instances of NVIDIA's device plugin, whose memory pods get of a GPU that they share.
    Mig,
    /// MIG instances of NVIDIA's device plugin, for which pods get an instance of their own.
    MigInstance,
}

impl Sharer {
    /// The sharer that provides the pod's request. HAMi's pods that request whole GPUs look like pods of NVIDIA's
    /// device plugin until HAMi has placed them.
    #[must_use]
    pub fn of(pod: &Value) -> Option<Self> {
        let requests = |key: &str| all(pod).any(|(_, it)| limit(it, key).is_some());
        if requests(names::GPUSHARE_MEM) {
            Some(Self::Gpushare)
        } else if requests(VOLCANO_GPUS) {
            Some(Self::Volcano)
        } else if requests(HAMI_MEMORY) || requests(HAMI_PERCENTAGE) || requests(HAMI_CORES) {
            Some(Self::Hami)
        } else if requests(SHARED_GPU) {
            Some(Self::TimeSlicing)
        } else if strangers::resources(pod).any(|(_, key)| key.starts_with(MIG)) {
            Some(Self::Mig)
        } else {
            let is_hamis = note(pod, HAMI_PLACED).is_some();
            let whole = if is_hamis { Self::Hami } else { Self::Whole };
            requests(names::NVIDIA_GPU).then_some(whole)
        }
    }

    /// Its name as people write it.
    pub(crate) fn called(self) -> &'static str {
        match self {
            Self::Gpushare => "gpushare",
            Self::Hami => "HAMi",
            Self::Volcano => "Volcano",
            Self::Whole => "NVIDIA's device plugin",
            Self::TimeSlicing => "time-slicing",
            Self::Mig | Self::MigInstance => "MIG names",
        }
    }

    /// The resources that the translation replaces.
    pub(crate) fn replaced(self) -> Vec<&'static str> {
        let keys: &[_] = match self {
            Self::Gpushare => &[names::GPUSHARE_MEM, "aliyun.com/gpu-count"],
            Self::Hami => &[
                names::NVIDIA_GPU,
                HAMI_MEMORY,
                HAMI_PERCENTAGE,
                HAMI_CORES,
                "nvidia.com/priority",
            ],
            Self::Volcano => &[
                VOLCANO_GPUS,
                names::VOLCANO_MEMORY,
                VOLCANO_PERCENTAGE,
                VOLCANO_CORES,
            ],
            Self::Whole => &[names::NVIDIA_GPU],
            Self::TimeSlicing => &[names::NVIDIA_GPU, SHARED_GPU],
            Self::Mig | Self::MigInstance => return PROFILES.map(|(key, _)| key).into(),
        };
        keys.to_vec()
    }

    /// The resource that limits compute, which gpustow does not limit, and the scheduler that pods name.
    fn leaves(self) -> (&'static str, &'static str) {
        match self {
            Self::Hami => (HAMI_CORES, "hami-scheduler"),
            Self::Volcano => (VOLCANO_CORES, "volcano"),
            _ => ("", ""),
        }
    }
}

/// How a namespace's requests are translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Whose they are.
    pub sharer: Sharer,
    /// MiB of one of its units of memory.
    pub mib_per_unit: u64,
    /// MiB that each GPU has at least, if that is known.
    pub mib_per_gpu: Option<u64>,
    /// MiB of each GPU that HAMi gives to a pod that requests GPUs alone. Without it, such a pod gets whole GPUs.
    pub default_mib: Option<u64>,
    /// How many shares time-slicing makes of a GPU.
    pub replicas: u64,
}

impl Terms {
    /// The terms of a sharer in its usual units.
    #[must_use]
    pub fn usual(sharer: Sharer) -> Self {
        let mib_per_unit = if sharer == Sharer::Gpushare { 1024 } else { 1 };
        Self {
            sharer,
            mib_per_unit,
            mib_per_gpu: None,
            default_mib: None,
            replicas: 1,
        }
    }

    /// MiB that pods request within this bound of an old resource, once they are translated. 0 for a resource that no amount
    /// follows from; `None` if the translation leaves the resource alone.
    #[must_use]
    pub fn bound(&self, key: &str, amount: u64) -> Option<u64> {
        let each = match key {
            names::GPUSHARE_MEM | HAMI_MEMORY | names::VOLCANO_MEMORY => self.mib_per_unit,
            names::NVIDIA_GPU | SHARED_GPU | VOLCANO_GPUS => {
                let default = self.default_mib.filter(|_| self.sharer == Sharer::Hami);
                let whole = default.or(self.mib_per_gpu).unwrap_or(LEAST_MIB);
                whole.div_ceil(self.replicas)
            }
            _ => mib_of(key).unwrap_or_default(),
        };
        let is_replaced = self.sharer.replaced().contains(&key);
        is_replaced.then(|| amount.saturating_mul(each))
    }

    /// The terms in a namespace's labels; `None` if they name no sharer.
    ///
    /// # Errors
    /// The unreadable label, and the fix.
    pub fn of(namespace: &ObjectMeta) -> Result<Option<Self>, BadRequest> {
        let none = BTreeMap::new();
        let labels = namespace.labels.as_ref().unwrap_or(&none);
        let Some(word) = labels.get(names::ADOPT_LABEL) else {
            return Ok(None);
        };
        let bad = |key: &str, problem: String| bad(format!("namespace label {key}"), problem);
        let sharer: Sharer = word.parse().map_err(|_| {
            let all = Sharer::VARIANTS.join(", ");
            let problem = format!(
                "{word} is no sharer whose requests gpustow translates: write one of {all}"
            );
            bad(names::ADOPT_LABEL, problem)
        })?;
        let number = |key: &str| {
            let said = labels.get(key).map(String::as_str);
            said.map(|it| {
                let problem = || format!("{it:?} is no number of MiB: write it like 40960");
                number(it).ok_or_else(|| bad(key, problem()))
            })
            .transpose()
        };
        let mut terms = Self::usual(sharer);
        if let Some(unit) = labels.get(names::ADOPT_UNIT_LABEL) {
            terms.mib_per_unit = unit_of(unit).ok_or_else(|| {
                let problem =
                    format!("{unit:?} is no unit: write MiB, GiB, or a number of MiB as 10MiB");
                bad(names::ADOPT_UNIT_LABEL, problem)
            })?;
        }
        terms.mib_per_gpu = number(names::ADOPT_MIB_LABEL)?;
        terms.default_mib = number(names::ADOPT_DEFAULT_LABEL)?;
        if sharer == Sharer::TimeSlicing {
            let said = labels.get(names::ADOPT_REPLICAS_LABEL);
            let said = said.map_or("", String::as_str);
            let replicas = self::number(said).filter(|it| (1..=100).contains(it));
            terms.replicas = replicas.ok_or_else(|| {
                let problem = format!(
                    "{said:?} is no number of shares of a GPU: write 1 to 100, as replicas of the device plugin's configuration, \
                     which nodes have in their label {}",
                    names::NVIDIA_REPLICAS
                );
                bad(names::ADOPT_REPLICAS_LABEL, problem)
            })?;
        }
        Ok(Some(terms))
    }
}

/// A number of MiB in a label.
fn number(text: &str) -> Option<u64> {
    let is_number = text.bytes().all(|it| it.is_ascii_digit());
    let is_number = is_number && !text.starts_with('0') && text.len() <= 7;
    text.parse().ok().filter(|_| is_number)
}

/// The MiB of a unit.
#[must_use]
pub fn unit_of(text: &str) -> Option<u64> {
    match text {
        "MiB" => Some(1),
        "GiB" => Some(1024),
        other => number(other.strip_suffix("MiB")?),
    }
}

/// Does a container request a resource of another sharer?
#[must_use]
pub fn has_foreign_resources(pod: &Value) -> bool {
    strangers::resources(pod).any(|(_, key)| strangers::is_foreign(key))
}

/// Does a container request such a resource, or does the pod have such a key?
pub(crate) fn has_foreign_keys(pod: &Value) -> bool {
    let meta = &pod["metadata"];
    let keys = ["annotations", "labels"].map(|list| meta[list].as_object());
    let mut keys = keys.into_iter().flatten().flat_map(|list| list.keys());
    has_foreign_resources(pod) || keys.any(|key| strangers::is_foreign(key))
}

/// One container's request of the other sharer.
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

/// Makes gpustow's request of another sharer's.
///
/// # Errors
/// The request that is not translated, and the fix.
pub(crate) fn translate(
    patch: &mut Patch,
    warnings: &mut Vec<String>,
    terms: Terms,
    resource: &str,
) -> Result<(), BadRequest> {
    let mut wishes = Vec::new();
    let is_again = note(&patch.pod, names::ADOPTED).is_some();
    for (path, it) in all(&patch.pod) {
        if let Some(wish) = wish(&path, it, terms, resource, is_again)? {
            wishes.push((path, name(it).to_owned(), wish));
        }
    }
    if !wishes.is_empty() {
        judge(&patch.pod, terms.sharer, &wishes, resource)?;
        change(patch, terms.sharer, &wishes, resource);
        let adopted = note(&patch.pod, names::ADOPTED).unwrap_or_default();
        if adopted.contains(", without ") {
            warnings.push(format!(
                "gpustow does not limit compute: the pod was translated as {adopted}"
            ));
        }
    }
    strangers::of_sharer(&patch.pod, terms.sharer, resource, warnings)
}

/// A container's request of the sharer. `is_again` if the pod was translated before.
fn wish(
    path: &str,
    it: &Value,
    terms: Terms,
    resource: &str,
    is_again: bool,
) -> Result<Option<Wish>, BadRequest> {
    let asks = |key: &str| limit(it, key).is_some();
    let at = |key: &str| format!("{}.resources.limits[{key}]", field(path));
    let number = |key: &str| amount(it, key).map_err(|problem| bad(at(key), problem));
    let (gpus, memory, percentage) = match terms.sharer {
        Sharer::Gpushare => (names::GPUSHARE_MEM, names::GPUSHARE_MEM, ""),
        Sharer::Hami => (names::NVIDIA_GPU, HAMI_MEMORY, HAMI_PERCENTAGE),
        Sharer::Volcano => (VOLCANO_GPUS, names::VOLCANO_MEMORY, VOLCANO_PERCENTAGE),
        Sharer::Whole => (names::NVIDIA_GPU, "", ""),
        Sharer::TimeSlicing => (names::NVIDIA_GPU, SHARED_GPU, ""),
        Sharer::Mig | Sharer::MigInstance => (profile(path, it, resource)?, "", ""),
    };
    let mut asked = [gpus, memory, percentage].into_iter();
    let first = match terms.sharer {
        Sharer::Volcano => asked.next().filter(|key| asks(key)),
        _ => asked.find(|key| asks(key)),
    };
    let Some(first) = first else {
        return Ok(None);
    };
    if asks(resource) {
        return Err(bad(at(first), asked_twice(first, resource, is_again)));
    }
    if terms.sharer == Sharer::TimeSlicing {
        let shares = number(names::NVIDIA_GPU)?.saturating_add(number(SHARED_GPU)?);
        return Ok(Some(of_shares(shares, terms)));
    }
    let units = number(memory)?;
    let gpus = match terms.sharer {
        Sharer::Gpushare => 1,
        _ => number(gpus)?.max(1),
    };
    let per_gpu = terms.mib_per_gpu.unwrap_or(LEAST_MIB);
    let part = limit(it, percentage).filter(|it| **it != "100");
    let (each, percentage, is_whole) = match (units, part) {
        (0, None) => {
            let is_alone = terms.sharer == Sharer::Hami && limit(it, percentage).is_none();
            let default = terms.default_mib.filter(|_| is_alone);
            match mib_of(first).or(default) {
                Some(mib) => (mib, 0, false),
                None => (per_gpu, 0, true),
            }
        }
        (0, Some(part)) => {
            let part = whole(part).filter(|it| (1..100).contains(it));
            let part =
                part.ok_or_else(|| untranslatable(at(percentage), terms.sharer, resource))?;
            ((per_gpu * part / 100).max(1), part, false)
        }
        (units, _) => (units.saturating_mul(terms.mib_per_unit), 0, false),
    };
    Ok(Some(Wish {
        gpus,
        mib: gpus.saturating_mul(each),
        percentage,
        whole: is_whole,
        units,
    }))
}

/// The amount of a resource in a container's limits, zero if there is none.
fn amount(it: &Value, key: &str) -> Result<u64, String> {
    limit(it, key).map_or(Ok(0), |amount| {
        let said = amount.as_str().unwrap_or_default();
        whole(amount).ok_or_else(|| format!("{said:?} is not a whole number: write one"))
    })
}

/// Why a container that has `first` cannot have gpustow's resource, too.
fn asked_twice(first: &str, resource: &str, is_again: bool) -> String {
    match is_again {
        false => format!("a container asks either for this or for {resource}: remove one of them"),
        true => format!(
            "a LimitRange of the namespace, or another webhook, gives it to the container that gpustow translated: remove \
             {first} from that"
        ),
    }
}

/// Why a request of HAMi or Volcano is refused.
fn untranslatable(field: String, sharer: Sharer, resource: &str) -> BadRequest {
    let grouped = match sharer {
        Sharer::Volcano => "of a pod of a PodGroup, ",
        _ => "",
    };
    let instead = match sharer {
        Sharer::Volcano => ", or leave the pod to Volcano in another namespace",
        _ => " instead",
    };
    let problem = format!(
        "gpustow cannot translate a request of {} for whole GPUs in one container and memory in another, {grouped}or for a \
         percentage that is not 1 to 100: write {resource}{instead}",
        sharer.called()
    );
    bad(field, problem)
}

/// Refuses pods that would be placed wrongly.
fn judge(
    pod: &Value,
    sharer: Sharer,
    wishes: &[(String, String, Wish)],
    resource: &str,
) -> Result<(), BadRequest> {
    let mut whole = wishes.iter().map(|(_, _, wish)| wish.whole);
    let first = whole.next();
    if whole.any(|it| Some(it) != first) {
        return Err(untranslatable(
            "spec.containers".to_owned(),
            sharer,
            resource,
        ));
    }
    let group = "scheduling.k8s.io/group-name";
    let grouped = note(pod, group).is_some_and(|it| !it.is_empty());
    match sharer == Sharer::Volcano && grouped {
        true => Err(untranslatable(
            format!("metadata.annotations[{group}]"),
            sharer,
            resource,
        )),
        false => Ok(()),
    }
}

fn change(patch: &mut Patch, sharer: Sharer, wishes: &[(String, String, Wish)], resource: &str) {
    let (cores, scheduler) = sharer.leaves();
    let word: &str = sharer.into();
    let adopted = match all(&patch.pod).any(|(_, it)| limit(it, cores).is_some()) {
        true => format!("{word}, without {cores}"),
        false => word.to_owned(),
    };
    patch.annotate(names::ADOPTED, &adopted);
    if wishes.iter().all(|(_, _, wish)| wish.whole) {
        patch.annotate(names::EXCLUSIVE, "true");
    }
    if sharer == Sharer::MigInstance {
        patch.annotate(names::ISOLATION, "mig");
    }
    if matches!(sharer, Sharer::Hami | Sharer::Volcano) {
        choose(patch);
    }
    if patch.pod["spec"]["schedulerName"] == scheduler {
        patch.set("/spec", "schedulerName", json!("default-scheduler"));
    }
    let of_pod: u64 = wishes
        .iter()
        .fold(0, |all, (_, _, it)| all.saturating_add(it.units));
    for (path, own, wish) in wishes {
        if wish.gpus > 1 {
            let key = format!("{}{own}", names::GPU_COUNT_OF);
            patch.annotate(&key, &wish.gpus.to_string());
        }
        if wish.percentage > 0 {
            let key = format!("{}{own}", names::GPU_MEM_PERCENTAGE_OF);
            patch.annotate(&key, &wish.percentage.to_string());
        }
        for list in ["limits", "requests"] {
            for key in sharer.replaced() {
                patch.take(&format!("{path}/resources/{list}"), key);
            }
        }
        patch.request(path, resource, wish.mib);
        if sharer == Sharer::Gpushare {
            // Programs find the amounts in the variables that gpushare gives them, in its unit.
            let own = wish.units.to_string();
            patch.give_text(path, "ALIYUN_COM_GPU_MEM_CONTAINER", &own);
            patch.give_text(path, "ALIYUN_COM_GPU_MEM_POD", &of_pod.to_string());
        }
    }
}

/// Writes HAMi's choice of GPUs into gpustow's annotations. HAMi's names of models begin with the maker's twice.
fn choose(patch: &mut Patch) {
    let notes = notes(&patch.pod);
    for (theirs, ours, around) in CHOICES {
        let Some(value) = notes.get(theirs).filter(|_| !notes.contains_key(ours)) else {
            continue;
        };
        let entries = value.split(',').map(str::trim);
        let entries = entries.filter(|it| !it.is_empty()).map(|it| {
            let name = it.strip_prefix("NVIDIA-").unwrap_or(it);
            format!("{around}{name}{around}")
        });
        let entries = entries.collect::<Vec<_>>().join(",");
        if !entries.is_empty() {
            patch.annotate(ours, &entries);
        }
    }
}
