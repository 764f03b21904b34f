//! The ledger through its public API: behaviour by theme, and a model test of random histories.

mod binding;
mod bounds;
mod budget;
mod build;
mod burst;
mod call_back;
mod filter;
mod forged;
mod gangs;
mod later;
mod line;
mod links;
mod mix;
mod model;
mod moves;
mod nominated;
mod over_limit;
mod places;
mod preempt;
mod reports;
mod rescan;
mod scattered;
mod shortage;
mod unfenced;
mod wake;
mod waking;
