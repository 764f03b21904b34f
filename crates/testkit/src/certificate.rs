//! Certificates of webhooks.

use std::path::Path;

use anyhow::Result;

/// Writes `tls.crt` and `tls.key` for the webhook by this name, signed by a new authority, which is returned in PEM.
///
/// # Errors
/// The files cannot be written.
pub fn certificate(folder: &Path, of: &str) -> Result<String> {
    let root_key = rcgen::KeyPair::generate()?;
    let mut root = rcgen::CertificateParams::default();
    root.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    // Two authorities of one name are indistinguishable.
    let name = format!("{:016x}", rand::random::<u64>());
    root.distinguished_name
        .push(rcgen::DnType::CommonName, name);
    let issuer = rcgen::Issuer::from_params(&root, &root_key);
    let key = rcgen::KeyPair::generate()?;
    let leaf = rcgen::CertificateParams::new([of.to_owned()])?;
    std::fs::write(folder.join("tls.crt"), leaf.signed_by(&key, &issuer)?.pem())?;
    std::fs::write(folder.join("tls.key"), key.serialize_pem())?;
    Ok(root.self_signed(&root_key)?.pem())
}
