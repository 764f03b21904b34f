//! The numbers of GPU errors, in NVIDIA's words. docs/reference/messages.md has an action for each.

use strum::{EnumString, IntoStaticStr, VariantArray};

/// XIDs, the errors that NVIDIA's driver reports, by
/// <https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html>.
pub const XIDS: [(u64, &str); 17] = [
    (13, "graphics engine exception"),
    (31, "GPU memory page fault"),
    (43, "GPU stopped processing"),
    (45, "preemptive cleanup, due to previous errors"),
    (48, "double bit ECC error"),
    (62, "internal micro-controller halt"),
    (63, "ECC page retirement or row remapping recorded"),
    (64, "ECC page retirement or row remapping failed"),
    (68, "video processor exception"),
    (74, "NVLink error"),
    (79, "GPU has fallen off the bus"),
    (92, "high single-bit ECC error rate"),
    (94, "contained ECC error"),
    (95, "uncontained ECC error"),
    (109, "context switch timeout"),
    (119, "GSP RPC timeout"),
    (120, "GSP error"),
];

/// Return values of NVML, by `nvmlReturn_t` in nvml.h.
pub const NVML: [(u64, &str); 8] = [
    (4, "no permission"),
    (9, "NVIDIA driver is not loaded"),
    (11, "the kernel detected an interrupt issue with the GPU"),
    (14, "infoROM is corrupted"),
    (
        15,
        "GPU has fallen off the bus or is otherwise inaccessible",
    ),
    (16, "GPU must be reset before it can be used again"),
    (18, "driver and library versions do not match"),
    (999, "unknown error of the driver"),
];

/// The fault that keeps an agent from reading any GPU of its node. As a string, the reason of the condition `Ready` of
/// the `GpuNode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, EnumString, VariantArray)]
pub enum NodeFault {
    /// NVIDIA's library is not there.
    LibraryMissing,
    /// The library is there, the driver is not.
    DriverNotLoaded,
    /// The driver does not answer.
    DriverFailed,
    /// The driver shows the agent a limit instead of the GPUs.
    UnderGpuLimit,
}

impl NodeFault {
    /// In two or three words, for lists.
    #[must_use]
    pub fn in_short(self) -> &'static str {
        match self {
            Self::LibraryMissing => "no driver library",
            Self::DriverNotLoaded => "driver not loaded",
            Self::DriverFailed => "driver failed",
            Self::UnderGpuLimit => "agent under a GPU limit",
        }
    }

    /// The fix. The agent tries again by itself.
    #[must_use]
    pub fn fix(self) -> &'static str {
        match self {
            Self::LibraryMissing => {
                "install the NVIDIA driver, and let the agent's container see its libraries (docs/platforms.md); the \
                 agent resumes by itself"
            }
            Self::DriverNotLoaded => {
                "load the NVIDIA driver on the node; the agent resumes by itself"
            }
            Self::DriverFailed => {
                "run nvidia-smi on the node; if it fails too, reload the driver or restart the node; the agent resumes \
                 by itself"
            }
            Self::UnderGpuLimit => "run the agent without a limit of GPU memory",
        }
    }
}

/// A card's reason not to get pods, with the meaning of its number, if the number is known.
#[must_use]
pub fn in_words(reason: &str) -> String {
    let table = [("XID ", XIDS.as_slice()), ("NVML's error ", &NVML)];
    let meaning = table.iter().find_map(|(prefix, table)| {
        let number: u64 = reason.strip_prefix(prefix)?.parse().ok()?;
        table.iter().find(|(known, _)| *known == number)
    });
    match meaning {
        Some((_, meaning)) => format!("{reason} ({meaning})"),
        None => reason.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_errors_have_words() {
        for (reason, words) in [
            ("XID 79", "XID 79 (GPU has fallen off the bus)"),
            (
                "NVML's error 16",
                "NVML's error 16 (GPU must be reset before it can be used again)",
            ),
            ("XID 4711", "XID 4711"),
            ("XID 79: fallen off the bus", "XID 79: fallen off the bus"),
            ("uncorrectable memory error", "uncorrectable memory error"),
        ] {
            assert_eq!(in_words(reason), words);
        }
    }
}
