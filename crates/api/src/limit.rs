//! How much of each of its GPUs a container may use beyond its request, and how that limit is enforced. This module
//! alone reads these annotations. The policies judge by the same rules
//! (`crates/policies/policies/rules-variables.yaml`).

use std::collections::BTreeMap;

use gpustow_pack::{Mib, Request};
use k8s_openapi::api::core::v1::EnvVar;
use strum::{Display, EnumString, IntoStaticStr, VariantArray, VariantNames};

use crate::bad_request::{BadRequest, MAX_MIB_PER_GPU, annotation, field_of};
use crate::names;

/// The lowest limit of a container on a GPU: the memory that CUDA keeps for itself must fit.
pub const FLOOR: Mib = Mib(1024);
/// The memory that CUDA keeps for itself of a limit: NVIDIA's own measurement with driver 615 was 816 MiB.
pub const CONTEXT: Mib = Mib(832);
/// A limit that is the whole card, whatever its size.
pub const WHOLE: Mib = Mib(u64::MAX);

/// Who sees to it that a container keeps its limit; as a string, the annotation's value.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Display, EnumString, IntoStaticStr, VariantNames,
)]
#[strum(serialize_all = "lowercase")]
pub enum Enforce {
    /// The driver: an allocation beyond the limit fails.
    Driver,
    /// The agent: it reports a pod that uses more.
    #[default]
    Watch,
    /// No component.
    None,
}

impl Enforce {
    pub(crate) fn read(word: &str) -> Result<Self, String> {
        word.parse()
            .map_err(|_| format!("{word:?} is none of {}", Self::VARIANTS.join(", ")))
    }
}

/// Whether the driver would hold a container to a limit of a card's memory; as a string, the word in the
/// `GpuNode`. The most lasting hindrances come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, IntoStaticStr, VariantArray)]
pub enum Support {
    /// It would.
    Holds,
    /// Not on a MIG instance.
    Mig,
    /// Not on a card without memory of its own.
    UnifiedMemory,
    /// The driver cannot.
    Driver,
    /// The node has cgroups of version 1, or the agent does not see the cgroups of its node.
    Cgroup,
    /// The agent's flags do not state that the container toolkit or the agent sets limits.
    Toolkit,
    /// A container runs here without the limit that it should have.
    Missing,
}

impl Support {
    /// Why no limit holds, for people.
    #[must_use]
    pub fn in_words(self) -> &'static str {
        match self {
            Self::Holds => "limits hold",
            Self::Mig => "a MIG instance is limited only by its size",
            Self::UnifiedMemory => "it shares the host's memory",
            Self::Driver => "limits need driver 615 or later",
            Self::Cgroup => {
                "its node has cgroup v1, or its agent does not see the node's (--cgroup)"
            }
            Self::Toolkit => {
                "nothing sets limits on this node: start its agent with --toolkit-limits or --set-limits"
            }
            Self::Missing => "a container runs there without its limit",
        }
    }
}

/// The reason why no limit holds on a card with this report; none if a limit holds.
#[must_use]
pub fn hindrance(said: Option<&str>) -> Option<&'static str> {
    match said.map(str::parse) {
        None => Some("its agent does not say whether it can"),
        Some(Err(_)) => Some("its agent gives a reason that this version does not know"),
        Some(Ok(Support::Holds)) => None,
        Some(Ok(other)) => Some(other.in_words()),
    }
}

/// A container that asks.
pub(crate) struct Asking<'a> {
    pub(crate) path: &'a str,
    pub(crate) name: &'a str,
    pub(crate) gpus: u32,
    /// Of each GPU.
    pub(crate) mib: Mib,
    pub(crate) env: &'a [EnvVar],
}

/// How much of its GPUs a pod requests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Size {
    Mib,
    /// A percentage: how much that is follows from the GPU.
    Part,
    /// MPS holds each process to the request of its container.
    Shared,
    Whole,
    /// A MIG instance, which holds the pod by itself.
    Instance,
}

impl Size {
    /// Why such a pod cannot set a limit, if so.
    fn refuses_limit(self) -> Option<&'static str> {
        match self {
            Self::Mib => None,
            Self::Part => Some("a pod that requests a percentage cannot set a limit: remove it"),
            Self::Shared => {
                Some("a pod that requests a share of compute cannot set a limit: remove it")
            }
            Self::Whole => Some("exclusive pods cannot set a limit: remove it"),
            Self::Instance => Some("a pod with a MIG instance cannot set a limit: remove it"),
        }
    }
}

type Notes = BTreeMap<String, String>;

/// The annotation with the limit of a container, and its value.
fn said<'a>(notes: &'a Notes, name: &str) -> Option<(String, &'a str)> {
    let own = format!("{}{name}", names::MEM_LIMIT_OF);
    [own, names::MEM_LIMIT.to_owned()]
        .into_iter()
        .find_map(|key| {
            let value = notes.get(&key)?;
            Some((key, value.as_str()))
        })
}

/// A number of MiB, if it is one that a container may have.
fn amount(text: &str) -> Option<u64> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit()) && text.len() <= 9;
    text.parse().ok().filter(|mib| digits && *mib > 0)
}

/// The MiB in a number with the unit Gi or Mi: only forms that the policies read alike.
fn in_mib(text: &str) -> Option<u64> {
    let forms = [("Gi", 1024, 5), ("Mi", 1, 8)];
    forms.into_iter().find_map(|(unit, mib, digits)| {
        let number = text.strip_suffix(unit)?;
        let plain = number.bytes().all(|byte| byte.is_ascii_digit()) && number.len() <= digits;
        let number: u64 = number.parse().ok()?;
        (plain && !text.starts_with('0')).then(|| number * mib)
    })
}

/// The limit that the driver must enforce on each container, for each of its GPUs; zero if the driver does not limit
/// it. `waits` means that the pod has been created and is not bound. Its containers must then have this limit in their
/// variables; afterwards they may follow the annotation (see the agent's --set-limits).
///
/// # Errors
/// The annotation or field that is wrong, and the fix.
pub(crate) fn of_driver(
    notes: &Notes,
    asking: &[Asking<'_>],
    size: Size,
    waits: bool,
    resource: &str,
) -> Result<Vec<Mib>, BadRequest> {
    let enforce = annotation(notes, names::ENFORCE, Enforce::read)?.unwrap_or_default();
    if enforce == Enforce::Driver && size == Size::Part {
        return Err(BadRequest {
            field: field_of(names::ENFORCE),
            problem: "the driver cannot hold a pod to a percentage: write watch or none".to_owned(),
        });
    }
    if enforce == Enforce::Driver && size == Size::Instance {
        return Err(BadRequest {
            field: field_of(names::ENFORCE),
            problem: "a MIG instance limits the pod by itself: write watch or none".to_owned(),
        });
    }
    let driver = enforce == Enforce::Driver && matches!(size, Size::Mib | Size::Shared);
    let limits = asking
        .iter()
        .map(|it| of_container(notes, it, size, driver, resource))
        .collect::<Result<Vec<Mib>, BadRequest>>()?;
    if !driver {
        return Ok(vec![Mib::ZERO; asking.len()]);
    }
    let limits = limits.into_iter().map(|limit| match limit {
        WHOLE => Mib::ZERO,
        limit => limit,
    });
    let limits: Vec<Mib> = limits.collect();
    for (it, limit) in asking.iter().zip(&limits) {
        if waits && *limit > Mib::ZERO && !bears(it.env, *limit) {
            return Err(BadRequest {
                field: format!("{}.env", it.path),
                problem: format!(
                    "{} must be {} and {} 0, or the driver holds no limit: create the pod again, so that gpustow's \
                     admission writes them, or write them yourself",
                    names::MEMORY_LIMIT,
                    limit.0,
                    names::MEMORY_REQUEST
                ),
            });
        }
    }
    Ok(limits)
}

/// Does NVIDIA's hook find this limit there? It takes the first of several.
fn bears(env: &[EnvVar], limit: Mib) -> bool {
    let is = |name: &str, value: &str| {
        let first = env.iter().find(|it| it.name == name);
        first.is_some_and(|it| it.value.as_deref() == Some(value))
    };
    is(names::MEMORY_LIMIT, &limit.0.to_string()) && is(names::MEMORY_REQUEST, "0")
}

fn of_container(
    notes: &Notes,
    it: &Asking<'_>,
    size: Size,
    driver: bool,
    resource: &str,
) -> Result<Mib, BadRequest> {
    let gpus = u64::from(it.gpus);
    let asked = it.mib.0.saturating_mul(gpus);
    let low = |field: String, mib: u64| {
        let problem = format!(
            "{mib} MiB over {gpus} GPUs is below the minimum of {} on each: write at \
             least {}",
            FLOOR.0,
            FLOOR.0 * gpus
        );
        Err(BadRequest { field, problem })
    };
    let Some((key, text)) = said(notes, it.name) else {
        return match driver && it.mib < FLOOR {
            true => low(format!("{}.resources.limits[{resource}]", it.path), asked),
            false => Ok(it.mib),
        };
    };
    let bad = |problem: String| {
        let field = field_of(&key);
        Err(BadRequest { field, problem })
    };
    if let Some(problem) = size.refuses_limit() {
        return bad(problem.to_owned());
    }
    if text == "max" {
        return Ok(WHOLE);
    }
    let Some(mib) = amount(text) else {
        let write = match in_mib(text) {
            Some(mib) => format!("the unit is MiB already, write {mib}"),
            None => "write MiB over all GPUs of a container".to_owned(),
        };
        return bad(format!("{text:?} is no amount: {write}, or max"));
    };
    if mib < asked {
        return bad(format!(
            "{mib} MiB are less than the {asked} that container {} asks for: write at least {asked}, or max",
            it.name
        ));
    }
    if !mib.is_multiple_of(gpus) {
        let even = (mib / gpus + 1) * gpus;
        return bad(format!(
            "{mib} MiB do not split evenly over {gpus} GPUs: write {even}"
        ));
    }
    if mib / gpus > MAX_MIB_PER_GPU {
        return bad(format!("no GPU has {} MiB: write max", mib / gpus));
    }
    match Mib(mib / gpus) {
        each if each < FLOOR => low(field_of(&key), mib),
        each => Ok(each),
    }
}

/// How the limits of a pod with these annotations are enforced, and the limit of each claim on each of its GPUs. Other
/// code refuses a pod with an unreadable limit.
#[must_use]
pub fn allowed(notes: &Notes, request: &Request, containers: &[Box<str>]) -> (Enforce, Vec<Mib>) {
    let enforce = notes.get(names::ENFORCE);
    let enforce = enforce.and_then(|word| Enforce::read(word).ok());
    let claims = request.claims.iter().zip(containers);
    let of = claims.map(|(claim, name)| may_use(notes, name, claim.mib, claim.gpus));
    (enforce.unwrap_or_default(), of.collect())
}

/// May one of these use more of its GPUs than it asks for?
pub(crate) fn bursts(notes: &Notes, asking: &[Asking<'_>]) -> bool {
    asking
        .iter()
        .any(|it| may_use(notes, it.name, it.mib, it.gpus) > it.mib)
}

/// The limit of a container with these annotations on each of its GPUs. An unreadable limit counts as absent.
fn may_use(notes: &Notes, name: &str, asked: Mib, gpus: u32) -> Mib {
    match said(notes, name) {
        Some((_, "max")) => WHOLE,
        Some((_, text)) => {
            amount(text).map_or(asked, |mib| Mib(mib / u64::from(gpus).max(1)).max(asked))
        }
        None => asked,
    }
}

/// The literal of a container, as the policies compute it, for pods that may be wrong in every other way.
pub fn literal(said: Option<&str>, asked: Option<u64>, gpus: u64) -> Option<String> {
    let mib = match said {
        Some("max") => return None,
        Some(text) => amount(text).unwrap_or(0),
        // As a policy reads an amount that is not a whole number.
        None => asked.unwrap_or(i64::MAX.unsigned_abs()),
    };
    Some((mib / gpus.max(1)).to_string())
}

#[cfg(test)]
mod tests;
