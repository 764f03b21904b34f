//! The next step for the webhook's certificate, from the present Secret and configuration. This module does not make
//! calls.

use std::collections::BTreeMap;
use std::time::Duration;

use gpustow_api::names;
use gpustow_serve::Tls;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::jiff::Timestamp;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair};

/// For how long a certificate holds.
const LIFETIME: Duration = Duration::from_secs(90 * DAY);
/// After how long another is made.
const RENEWAL: Duration = Duration::from_secs(60 * DAY);
/// How far an API server's clock may be behind.
const SLACK: Duration = Duration::from_secs(DAY);
const DAY: u64 = 24 * 60 * 60;
/// Certificates that the configuration trusts: the ones in the Secret, and the latest before them.
const TRUSTED: usize = 3;
const END: &str = "-----END CERTIFICATE-----";

const CERT: &str = "tls.crt";
const KEY: &str = "tls.key";
const AUTHORITY: &str = "ca.crt";
const NEXT_CERT: &str = "next.crt";
const NEXT_KEY: &str = "next.key";

/// A certificate and its key, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) cert: String,
    pub(super) key: String,
}

/// The contents of the Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Kept {
    /// With which every replica serves.
    pub(super) now: Pair,
    /// Who signed that.
    pub(super) authority: String,
    /// With which it will serve once the API server trusts it.
    pub(super) next: Option<Pair>,
    /// When the next renewal is due. It is due at once if the Secret does not set it, as in a Secret that is not ours.
    pub(super) renew_after: Option<Timestamp>,
}

/// The input for the choice of a step.
pub(super) struct Seen<'a> {
    /// The contents of the Secret, if they can be used.
    pub(super) found: Option<&'a Kept>,
    /// The last usable contents of the Secret.
    pub(super) kept: Option<&'a Kept>,
    /// The authorities that the webhook's configuration trusts, in PEM; nothing if there is no configuration.
    pub(super) bundle: Option<&'a str>,
    /// The next certificate has been trusted for long enough.
    pub(super) settled: bool,
    /// Each replica that remembers the Secret had long enough to write it again.
    pub(super) forgotten: bool,
    pub(super) now: Timestamp,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing is to be done now.
    Wait,
    /// This goes into the Secret.
    Write(Kept),
    /// This goes into the configuration.
    Trust(String),
}

/// The next step: a certificate is trusted before it is served.
pub(super) fn next(seen: &Seen<'_>) -> Result<Step, rcgen::Error> {
    let bundle = seen.bundle.unwrap_or_default();
    let Some(found) = seen.found else {
        return Ok(match seen.kept {
            Some(kept) => Step::Write(kept.clone()),
            // Some replica served with one of these, and may still.
            None if certificates(bundle).next().is_some() && !seen.forgotten => Step::Wait,
            None => Step::Write(Kept::of_pair(Pair::new(seen.now)?, seen.now)),
        });
    };
    if seen.bundle.is_some() && found.trusted().any(|cert| !bundle.contains(cert)) {
        return Ok(Step::Trust(found.bundle(bundle)));
    }
    Ok(match &found.next {
        Some(next) if seen.settled => Step::Write(Kept::of_pair(next.clone(), seen.now)),
        Some(_) => Step::Wait,
        None if found.renew_after.is_none_or(|at| at <= seen.now) => {
            let mut renewed = found.clone();
            renewed.next = Some(Pair::new(seen.now)?);
            Step::Write(renewed)
        }
        None => Step::Wait,
    })
}

impl Pair {
    fn new(now: Timestamp) -> Result<Pair, rcgen::Error> {
        let name = format!("{}.{}.svc", names::WEBHOOK, names::NAMESPACE);
        let mut params = CertificateParams::new([name])?;
        params
            .distinguished_name
            .push(DnType::CommonName, names::WEBHOOK);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let now = u64::try_from(now.as_second()).unwrap_or(0);
        let now = rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(now);
        params.not_before = now - SLACK;
        params.not_after = now + LIFETIME;
        let key = KeyPair::generate()?;
        Ok(Pair {
            cert: params.self_signed(&key)?.pem(),
            key: key.serialize_pem(),
        })
    }
}

impl Kept {
    /// A certificate that is its own authority.
    fn of_pair(now: Pair, made: Timestamp) -> Kept {
        Kept {
            authority: now.cert.clone(),
            now,
            next: None,
            renew_after: made.checked_add(RENEWAL).ok(),
        }
    }

    /// None if the Secret's certificate cannot be served. A certificate in `known` can be served.
    pub(super) fn of(secret: &Secret, known: Option<&Kept>) -> Option<Kept> {
        let data = secret.data.as_ref()?;
        let text = |key: &str| String::from_utf8(data.get(key)?.0.clone()).ok();
        let pair = |cert: &str, key: &str| {
            let (cert, key) = (text(cert)?, text(key)?);
            let pair = Pair { cert, key };
            let before = known.is_some_and(|it| it.now == pair || it.next.as_ref() == Some(&pair));
            let served = before || Tls::given(&pair.cert, &pair.key).is_ok();
            served.then_some(pair)
        };
        let now = pair(CERT, KEY)?;
        let notes = secret.metadata.annotations.as_ref();
        let renew_after = notes.and_then(|notes| notes.get(names::RENEW_AFTER));
        Some(Kept {
            authority: text(AUTHORITY)
                .filter(|it| it.contains(END))
                .unwrap_or_else(|| now.cert.clone()),
            next: pair(NEXT_CERT, NEXT_KEY),
            renew_after: renew_after.and_then(|at| at.parse().ok()),
            now,
        })
    }

    /// Does the configuration trust the certificate that is served?
    pub(super) fn is_trusted(&self, bundle: &str) -> bool {
        certificates(&self.authority).any(|cert| bundle.contains(cert))
    }

    /// Puts it into the Secret.
    pub(super) fn fill(&self, secret: &mut Secret) {
        let mut data = BTreeMap::from([
            (CERT, &self.now.cert),
            (KEY, &self.now.key),
            (AUTHORITY, &self.authority),
        ]);
        if let Some(next) = &self.next {
            data.extend([(NEXT_CERT, &next.cert), (NEXT_KEY, &next.key)]);
        }
        let bytes = |text: &String| ByteString(text.clone().into_bytes());
        let data = data.into_iter();
        secret.data = Some(
            data.map(|(key, text)| (key.to_owned(), bytes(text)))
                .collect(),
        );
        let notes = secret.metadata.annotations.get_or_insert_default();
        match self.renew_after {
            Some(at) => notes.insert(names::RENEW_AFTER.to_owned(), at.to_string()),
            None => notes.remove(names::RENEW_AFTER),
        };
    }

    /// The authorities that the configuration has to trust.
    fn trusted(&self) -> impl Iterator<Item = &str> {
        let next = self.next.iter().map(|next| next.cert.as_str());
        next.chain([self.authority.as_str()]).flat_map(certificates)
    }

    /// `bundle` with them: who was trusted last goes last.
    fn bundle(&self, bundle: &str) -> String {
        let ours: Vec<&str> = self.trusted().collect();
        let others = certificates(bundle).filter(|cert| !ours.contains(cert));
        let others = others.take(TRUSTED.saturating_sub(ours.len()).max(1));
        let all: Vec<&str> = ours.iter().copied().chain(others).collect();
        all.join("\n") + "\n"
    }
}

/// Each certificate in a PEM text.
fn certificates(text: &str) -> impl Iterator<Item = &str> {
    let all = text.split_inclusive(END).map(str::trim);
    all.filter(|cert| cert.ends_with(END))
}

#[cfg(test)]
mod tests;
